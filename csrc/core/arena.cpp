#include "core/arena.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

[[noreturn]] void os_error(const char* what) {
    const int number = errno;
    throw Error(Code::kOs, std::string(what) + ": " + std::strerror(number), {number});
}

int duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) os_error("cannot duplicate the arena's descriptor");
    return copy;
}

constexpr std::uint64_t kHugeBytes = 2u << 20;

std::uint64_t free_huge_pages() {
    std::uint64_t count = 0;
    std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") >> count;
    return count;
}

// Whether to ask for huge pages: as wanted, where there are enough for the whole budget.
bool use_huge_pages(Want want, std::uint64_t budget_bytes, std::uint64_t page_bytes) {
    if (want == Want::kOff) return false;
    const std::uint64_t needed = (budget_bytes + kHugeBytes - 1) / kHugeBytes;
    const std::uint64_t free = free_huge_pages();
    const bool aligned = page_bytes % kHugeBytes == 0;
    if (aligned && free >= needed) return true;
    if (want == Want::kPrefer) return false;
    throw Error(Code::kConfig,
                aligned ? "huge_pages='require' needs " + std::to_string(needed) + " huge pages of 2 MiB and " + std::to_string(free) +
                              " are free; raise `sysctl vm.nr_hugepages`, or set huge_pages='prefer'"
                        : "huge_pages='require' needs page_bytes to be a multiple of 2 MiB, got " + std::to_string(page_bytes),
                {static_cast<std::int64_t>(needed), static_cast<std::int64_t>(free)});
}

bool lies_on_huge_pages(int fd) {
    struct statfs system {};
    return fstatfs(fd, &system) == 0 && static_cast<std::uint64_t>(system.f_type) == HUGETLBFS_MAGIC;
}

// Sealed at its full size: no reader can ever meet the end of the file. Mode 0400: another process of this user
// cannot reopen the read-only descriptor for writing by accident.
int create_file(std::uint64_t nbytes, bool huge) {
    const unsigned kind = huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0u;
    const int fd = memfd_create("poolweave-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING | kind);
    if (fd < 0) os_error("cannot create the arena's memory");
    const bool made = ftruncate(fd, static_cast<off_t>(nbytes)) == 0 && fchmod(fd, S_IRUSR) == 0 &&
                      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    if (!made) {
        const int number = errno;
        close(fd);
        errno = number;
        os_error("cannot size the arena's memory");
    }
    return fd;
}

}  // namespace

std::shared_ptr<Arena> Arena::create(std::uint64_t capacity_bytes, std::uint64_t budget_bytes, std::uint64_t page_bytes,
                                     MemoryKind kind) {
    const auto system_page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    if (!std::has_single_bit(page_bytes) || page_bytes < system_page) {
        throw Error(Code::kConfig, "page_bytes must be a power of two of at least " + std::to_string(system_page) +
                                       ", got " + std::to_string(page_bytes));
    }
    const std::uint64_t capacity = (capacity_bytes + page_bytes - 1) / page_bytes;
    const std::uint64_t budget = (budget_bytes + page_bytes - 1) / page_bytes;
    if (capacity == 0 || capacity >= kNoPage || budget > capacity) {
        throw Error(Code::kConfig, "an arena of " + std::to_string(capacity) + " pages cannot have a budget of " +
                                       std::to_string(budget) + "; it takes 1 to 2^32 - 2 pages and no larger budget");
    }
    const int fd = create_file(capacity * page_bytes, use_huge_pages(kind.huge_pages, budget * page_bytes, page_bytes));
    try {
        return std::shared_ptr<Arena>(new Arena(fd, PageLedger::create(fd, page_bytes, capacity, budget), kind.pinned));
    } catch (...) {
        close(fd);
        throw;
    }
}

std::shared_ptr<Arena> Arena::attach(int data_fd, int ledger_fd, Want pinned) {
    const int data = duplicate(data_fd);
    try {
        return std::shared_ptr<Arena>(new Arena(data, PageLedger::attach(data, duplicate(ledger_fd)), pinned));
    } catch (...) {
        close(data);
        throw;
    }
}

Arena::~Arena() {
    if (readonly_fd_ >= 0) close(readonly_fd_);
    close(data_fd_);
}

Arena::Stats Arena::stats() {
    const PageLedger::Counts counts = ledger_.counts();
    struct stat file {};
    if (fstat(data_fd_, &file) != 0) os_error("cannot stat the arena's memory");
    const std::uint64_t page = page_bytes();
    return {page, counts.capacity * page, counts.budget * page, counts.held * page, counts.kept * page,
            static_cast<std::uint64_t>(file.st_blocks) * 512, counts.processes, lies_on_huge_pages(data_fd_),
            static_cast<std::uint64_t>(pinned_bytes_.load()), counts.guests * page, counts.orphans * page};
}

void Arena::check() {
    ledger_.check();
    const Stats s = stats();
    if (s.resident_bytes > s.held_bytes + s.kept_bytes) throw std::logic_error("free pages without memory have memory");
}

int Arena::readonly_fd() {
    const std::lock_guard lock(mutex_);
    if (readonly_fd_ < 0) {
        const std::string path = "/proc/self/fd/" + std::to_string(data_fd_);
        readonly_fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (readonly_fd_ < 0) os_error("cannot reopen the arena's memory read-only");
    }
    return readonly_fd_;
}

}  // namespace poolweave
