#include "core/memfd_pages.hpp"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace poolweave {
namespace {

constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

[[noreturn]] void os_error(const char* what) {
    const int number = errno;
    throw Error(Code::kOs, std::string(what) + ": " + std::strerror(number), {number});
}

}  // namespace

int duplicate_fd(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) os_error("cannot duplicate the arena's descriptor");
    return copy;
}

// Sealed at its full size: no reader can ever meet the end of the file. Mode 0400: another process of this user
// cannot reopen the read-only descriptor for writing by accident.
std::unique_ptr<MemfdPages> MemfdPages::create(std::uint64_t nbytes, bool huge) {
    const unsigned kind = huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0u;
    const int fd = memfd_create("poolweave-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING | kind);
    if (fd < 0) os_error("cannot create the arena's memory");
    auto made = std::unique_ptr<MemfdPages>(new MemfdPages(fd));
    if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0 || fchmod(fd, S_IRUSR) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        os_error("cannot size the arena's memory");
    }
    return made;
}

std::unique_ptr<MemfdPages> MemfdPages::attach(int fd) {
    return std::unique_ptr<MemfdPages>(new MemfdPages(duplicate_fd(fd)));
}

MemfdPages::~MemfdPages() {
    if (readonly_fd_ >= 0) close(readonly_fd_);
    close(fd_);
}

// More is taken than asked for, to align the base, and what lies beside it is given back.
std::byte* MemfdPages::reserve(std::uint64_t nbytes, std::uint64_t alignment) {
    void* const got = mmap(nullptr, nbytes + alignment, PROT_READ, kReserve, -1, 0);
    if (got == MAP_FAILED) os_error(("cannot reserve " + std::to_string(nbytes) + " bytes of address space").c_str());
    auto* const first = static_cast<std::byte*>(got);
    const std::uint64_t before = (alignment - reinterpret_cast<std::uintptr_t>(got) % alignment) % alignment;
    if (before > 0) munmap(first, before);
    munmap(first + before + nbytes, alignment - before);
    return first + before;
}

void MemfdPages::unreserve(std::byte* base, std::uint64_t nbytes) noexcept { munmap(base, nbytes); }

void MemfdPages::map(std::byte* at, std::uint64_t offset, std::uint64_t nbytes) {
    if (mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, static_cast<off_t>(offset)) != MAP_FAILED) return;
    const int number = errno;
    const std::string what = "cannot map " + std::to_string(nbytes) + " bytes (" + std::strerror(number) + ")";
    if (number == ENOMEM) throw Error(Code::kConfig, what + "; raise page_bytes or `sysctl vm.max_map_count`");
    throw Error(Code::kOs, what, {number});
}

bool MemfdPages::unmap(std::byte* at, std::uint64_t nbytes) noexcept {
    return mmap(at, nbytes, PROT_READ, kReserve | MAP_FIXED, -1, 0) != MAP_FAILED;
}

void MemfdPages::release(std::uint64_t offset, std::uint64_t nbytes) {
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0) {
        os_error("cannot return pages to the system");
    }
}

std::uint64_t MemfdPages::resident_bytes() const {
    struct stat file {};
    if (fstat(fd_, &file) != 0) os_error("cannot stat the arena's memory");
    return static_cast<std::uint64_t>(file.st_blocks) * 512;
}

bool MemfdPages::huge_pages() const {
    struct statfs system {};
    return fstatfs(fd_, &system) == 0 && static_cast<std::uint64_t>(system.f_type) == HUGETLBFS_MAGIC;
}

std::uint64_t MemfdPages::nbytes() const {
    struct stat file {};
    if (fstat(fd_, &file) != 0) os_error("cannot stat the arena's memory");
    return static_cast<std::uint64_t>(file.st_size);
}

int MemfdPages::readonly_fd() {
    const std::lock_guard lock(mutex_);
    if (readonly_fd_ < 0) {
        const std::string path = "/proc/self/fd/" + std::to_string(fd_);
        readonly_fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (readonly_fd_ < 0) os_error("cannot reopen the arena's memory read-only");
    }
    return readonly_fd_;
}

}  // namespace poolweave
