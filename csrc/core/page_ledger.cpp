#include "core/page_ledger.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "core/process.hpp"

namespace poolweave {
namespace {

constexpr std::uint64_t kMagic = 0x3265'6e65'7261'7770ull;  // "pwarene2"
constexpr std::uint32_t kHole = 0;        // free, no memory behind it
constexpr std::uint32_t kKept = 1;        // free, memory behind it
constexpr std::uint32_t kFirstOwner = 2;  // + index of the process
constexpr std::size_t kMaxProcesses = 256;
constexpr std::uint32_t kOrphan = kFirstOwner + kMaxProcesses;  // no owner, but guests
constexpr std::size_t kGuestWords = kMaxProcesses / 64;

[[noreturn]] void os_error(const char* what) {
    const int number = errno;
    throw Error(Code::kOs, std::string(what) + ": " + std::strerror(number), {number});
}

struct Opener {
    ProcessId process;  // pid 0: an empty place
    std::uint32_t num_ranges;
    std::uint32_t sole;
    std::uint64_t num_held;  // as a guest
};

// Where the sets of guests begin: behind one word a page.
std::size_t guests_offset(std::size_t header_bytes, std::uint64_t capacity) {
    return (header_bytes + capacity * sizeof(std::uint32_t) + 7) / 8 * 8;
}

std::size_t ledger_bytes(std::size_t header_bytes, std::uint64_t capacity) {
    return guests_offset(header_bytes, capacity) + capacity * kGuestWords * sizeof(std::uint64_t);
}

}  // namespace

struct PageLedger::Header {
    std::uint64_t magic;
    std::uint64_t id;
    std::uint64_t page_bytes;
    std::uint64_t capacity;
    std::uint64_t budget;
    std::uint64_t held;
    std::uint64_t kept;
    std::uint64_t lowest_free;  // no page below it is free
    std::uint64_t touched;      // no page from here on was ever held: scans end here
    std::uint64_t guest_pages;  // with a guest: while 0 nobody looks for any
    std::uint64_t orphans;
    std::uint64_t departures;
    pthread_mutex_t mutex;
    Opener openers[kMaxProcesses];
};

// Holds the ledger's mutex; when its last holder died inside a call, the counters are rebuilt first.
class PageLedger::Guard {
  public:
    explicit Guard(PageLedger& ledger) : mutex_(&ledger.header_->mutex) {
        const int result = pthread_mutex_lock(mutex_);
        if (result == EOWNERDEAD) {
            pthread_mutex_consistent(mutex_);
            ledger.rebuild();
        } else if (result != 0) {
            errno = result;
            os_error("cannot lock the arena's ledger");
        }
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() { pthread_mutex_unlock(mutex_); }

  private:
    pthread_mutex_t* mutex_;
};

PageLedger::Header* PageLedger::map(int ledger_fd, std::size_t nbytes) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd, 0);
    if (memory == MAP_FAILED) os_error("cannot map the arena's ledger");
    return static_cast<Header*>(memory);
}

PageLedger PageLedger::create(PageSource& source, std::size_t page_bytes, std::uint64_t capacity, std::uint64_t budget) {
    const std::size_t nbytes = ledger_bytes(sizeof(Header), capacity);
    const int fd = memfd_create("poolweave-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) os_error("cannot create the arena's ledger");
    Header* header = nullptr;
    try {
        if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0) os_error("cannot size the arena's ledger");
        if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) os_error("cannot seal the arena's ledger");
        header = map(fd, nbytes);
    } catch (...) {
        close(fd);
        throw;
    }
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (getrandom(&header->id, sizeof header->id, 0) != sizeof header->id) header->id = static_cast<std::uint64_t>(getpid()) << 32 | fd;
    header->page_bytes = page_bytes;
    header->capacity = capacity;
    header->budget = budget;
    header->magic = kMagic;
    PageLedger ledger(source, fd, header, nbytes);
    ledger.enroll();
    return ledger;
}

PageLedger PageLedger::attach(PageSource& source, std::uint64_t data_bytes, int ledger_fd) {
    Header* header = nullptr;
    std::size_t nbytes = 0;
    try {
        struct stat ledger_stat {};
        if (fstat(ledger_fd, &ledger_stat) != 0) os_error("cannot stat the arena's ledger");
        nbytes = static_cast<std::size_t>(ledger_stat.st_size);
        if (nbytes >= sizeof(Header)) header = map(ledger_fd, nbytes);
        const bool ours = header != nullptr && header->magic == kMagic &&
                          nbytes == ledger_bytes(sizeof(Header), header->capacity) &&
                          data_bytes == header->capacity * header->page_bytes;
        if (!ours) throw Error(Code::kConfig, "the descriptors are not the two files of one arena of this version");
    } catch (...) {
        if (header != nullptr) munmap(header, nbytes);
        close(ledger_fd);
        throw;
    }
    PageLedger ledger(source, ledger_fd, header, nbytes);
    ledger.enroll();
    return ledger;
}

PageLedger::PageLedger(PageSource& source, int ledger_fd, Header* header, std::size_t nbytes)
    : source_(&source),
      ledger_fd_(ledger_fd),
      header_(header),
      owners_(reinterpret_cast<std::uint32_t*>(header + 1)),
      guests_(reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(header) + guests_offset(sizeof(Header), header->capacity))),
      nbytes_(nbytes) {}

PageLedger::PageLedger(PageLedger&& other) noexcept
    : source_(other.source_),
      ledger_fd_(std::exchange(other.ledger_fd_, -1)),
      header_(std::exchange(other.header_, nullptr)),
      owners_(other.owners_),
      guests_(other.guests_),
      nbytes_(other.nbytes_),
      self_(std::exchange(other.self_, 0)) {}

PageLedger::~PageLedger() {
    if (header_ == nullptr) return;
    if (self_ != 0) {
        try {
            Guard guard(*this);
            remove_guest_everywhere(self_ - kFirstOwner);
            release_owner(self_);
            header_->openers[self_ - kFirstOwner] = {};
        } catch (const Error&) {  // an unusable mutex: the next process that looks finds our pid dead
        }
    }
    munmap(header_, nbytes_);
    close(ledger_fd_);
}

void PageLedger::enroll() {
    Guard guard(*this);
    reap_locked();
    Opener* const end = header_->openers + kMaxProcesses;
    Opener* const place = std::find_if(header_->openers, end, [](const Opener& o) { return o.process.pid == 0; });
    if (place == end) {
        throw Error(Code::kConfig, "an arena takes " + std::to_string(kMaxProcesses) + " openers, and has them; close one");
    }
    *place = {current_process(), 0, 0, 0};
    self_ = kFirstOwner + static_cast<std::uint32_t>(place - header_->openers);
}

void PageLedger::add_range(bool sole) {
    Guard guard(*this);
    reap_locked();
    const bool refused = std::any_of(header_->openers, header_->openers + kMaxProcesses,
                                     [sole](const Opener& o) { return o.sole != 0 || (sole && o.num_ranges > 0); });
    if (refused) {
        throw Error(Code::kConfig, "this arena serves one range alone; create another arena, or reserve all its ranges as not sole");
    }
    Opener& self = header_->openers[self_ - kFirstOwner];
    self.sole = sole ? 1 : 0;
    ++self.num_ranges;
}

void PageLedger::drop_range() noexcept {
    try {
        Guard guard(*this);
        Opener& self = header_->openers[self_ - kFirstOwner];
        --self.num_ranges;
        self.sole = 0;
    } catch (const Error&) {  // an unusable mutex: the count goes with the process
    }
}

void PageLedger::take(std::span<std::uint32_t> pages, std::uint32_t first) {
    if (pages.empty()) return;
    Guard guard(*this);
    Header& h = *header_;
    if (h.held + pages.size() > h.budget) reap_locked();
    if (h.held + pages.size() > h.budget) {
        const std::uint64_t left = h.budget > h.held ? h.budget - h.held : 0;
        throw Error(Code::kOutOfPages,
                    "need " + std::to_string(pages.size()) + " pages of " + std::to_string(h.page_bytes) + " bytes, " +
                        std::to_string(left) + " of " + std::to_string(h.budget) + " left; raise the arena's budget",
                    {static_cast<std::int64_t>(pages.size()), static_cast<std::int64_t>(left),
                     static_cast<std::int64_t>(h.budget)});
    }
    std::uint64_t wish = first;
    for (std::uint32_t& page : pages) {
        const bool granted = wish < h.capacity && owners_[wish] < kFirstOwner;
        page = granted ? static_cast<std::uint32_t>(wish) : find_free();
        own(page);
        wish = std::uint64_t{page} + 1;
    }
    release_excess(h.budget);
}

void PageLedger::give(std::span<const std::uint32_t> pages) {
    Guard guard(*this);
    Header& h = *header_;
    for (const std::uint32_t page : pages) {
        if (page >= h.capacity || owners_[page] != self_) throw std::logic_error("a page is given back by who does not hold it");
        if (has_guest(page)) {
            owners_[page] = kOrphan;
            ++h.orphans;
            continue;
        }
        owners_[page] = kKept;
        --h.held;
        ++h.kept;
        h.lowest_free = std::min<std::uint64_t>(h.lowest_free, page);
    }
    release_excess(h.budget);
}

bool PageLedger::hold(std::span<const std::uint32_t> pages, const Member& lender) {
    Guard guard(*this);
    Header& h = *header_;
    if (lender.place >= kMaxProcesses) return false;
    const ProcessId& there = h.openers[lender.place].process;
    if (there.pid == 0 || there.pid != lender.process.pid || there.start_ticks != lender.process.start_ticks) return false;
    if (std::any_of(pages.begin(), pages.end(), [&](std::uint32_t p) { return p >= h.capacity || owners_[p] < kFirstOwner; })) return false;
    const std::uint32_t place = self_ - kFirstOwner;
    for (const std::uint32_t page : pages) {
        std::uint64_t& word = guests_[page * kGuestWords + place / 64];
        const std::uint64_t bit = std::uint64_t{1} << (place % 64);
        if ((word & bit) != 0) continue;
        h.guest_pages += !has_guest(page);
        word |= bit;
        ++h.openers[place].num_held;
    }
    return true;
}

void PageLedger::unhold(std::span<const std::uint32_t> pages) noexcept {
    try {
        Guard guard(*this);
        for (const std::uint32_t page : pages) remove_guest(page, self_ - kFirstOwner);
        release_excess(header_->budget);
    } catch (const Error&) {  // an unusable mutex: the pages go with the process
    }
}

void PageLedger::have_guests(std::span<const std::uint32_t> pages, std::span<const std::size_t> ends, std::span<std::uint8_t> out) {
    Guard guard(*this);
    const auto visited = [&](std::uint32_t page) { return page != kNoPage && has_guest(page); };
    for (std::size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++]) {
        const auto group = pages.subspan(begin, ends[i] - begin);
        out[i] = std::any_of(group.begin(), group.end(), visited);
    }
}

std::uint64_t PageLedger::departures() {
    Guard guard(*this);
    return header_->departures;
}

PageLedger::Member PageLedger::self() const { return {current_process(), self_ - kFirstOwner}; }

void PageLedger::set_budget(std::uint64_t pages) {
    Guard guard(*this);
    if (pages > header_->capacity) {
        throw Error(Code::kConfig, "a budget of " + std::to_string(pages) + " pages exceeds the arena's " +
                                       std::to_string(header_->capacity) + "; create it with a larger capacity");
    }
    header_->budget = pages;
    release_excess(pages);
}

std::uint64_t PageLedger::trim() {
    Guard guard(*this);
    const std::uint64_t kept = header_->kept;
    release_excess(0);
    return kept;
}

std::uint64_t PageLedger::reap() {
    Guard guard(*this);
    return reap_locked();
}

PageLedger::Counts PageLedger::counts() {
    Guard guard(*this);
    const Header& h = *header_;
    std::vector<std::int64_t> pids;  // a process may be registered several times
    for (const Opener& opener : h.openers) {
        if (opener.process.pid != 0) pids.push_back(opener.process.pid);
    }
    std::sort(pids.begin(), pids.end());
    const auto live = std::unique(pids.begin(), pids.end()) - pids.begin();
    return {h.capacity, h.budget, h.held, h.kept, static_cast<std::uint64_t>(live), h.guest_pages, h.orphans};
}

void PageLedger::check() {
    Guard guard(*this);
    const Header& h = *header_;
    std::uint64_t held = 0;
    std::uint64_t kept = 0;
    std::uint64_t guests = 0;
    std::uint64_t orphans = 0;
    for (std::uint64_t page = 0; page < h.touched; ++page) {
        const std::uint32_t owner = owners_[page];
        const bool visited = has_guest(page);
        held += owner >= kFirstOwner;
        kept += owner == kKept;
        guests += visited;
        orphans += owner == kOrphan;
        if (owner > kOrphan) throw std::logic_error("a page has an owner that cannot be");
        if (visited && owner < kFirstOwner) throw std::logic_error("a free page has guests");
        if (owner == kOrphan && !visited) throw std::logic_error("a page has neither owner nor guest and is not free");
        if (owner >= kFirstOwner && owner != kOrphan && h.openers[owner - kFirstOwner].process.pid == 0) throw std::logic_error("a page has no owner");
        if (owner < kFirstOwner && page < h.lowest_free) throw std::logic_error("a free page lies below lowest_free");
    }
    if (guests != h.guest_pages || orphans != h.orphans) throw std::logic_error("the ledger counts guests wrong");
    if (held != h.held || kept != h.kept) throw std::logic_error("the ledger's counters differ from its owners");
    if (h.kept > 0 && h.held + h.kept > h.budget) throw std::logic_error("pages are kept beyond the budget");
}

std::size_t PageLedger::page_bytes() const noexcept { return header_->page_bytes; }

std::uint64_t PageLedger::id() const noexcept { return header_->id; }

std::uint64_t PageLedger::capacity() const noexcept { return header_->capacity; }

// --- under the mutex ---------------------------------------------------------------------------------------

void PageLedger::rebuild() {
    Header& h = *header_;
    h.held = h.kept = h.lowest_free = h.guest_pages = h.orphans = 0;
    for (Opener& opener : h.openers) opener.num_held = 0;
    for (std::uint64_t page = 0; page < h.touched; ++page) {
        if (owners_[page] == kOrphan && !any_guest(page)) owners_[page] = kKept;
        h.held += owners_[page] >= kFirstOwner;
        h.kept += owners_[page] == kKept;
        h.orphans += owners_[page] == kOrphan;
        h.guest_pages += any_guest(page);
        for (std::uint32_t place = 0; place < kMaxProcesses && any_guest(page); ++place) {
            h.openers[place].num_held += guests_[page * kGuestWords + place / 64] >> (place % 64) & 1;
        }
    }
    ++h.departures;
    reap_locked();
}

std::uint64_t PageLedger::reap_locked() {
    const std::uint64_t before = header_->kept;
    for (std::size_t i = 0; i < kMaxProcesses; ++i) {
        Opener& opener = header_->openers[i];
        if (opener.process.pid == 0 || is_alive(opener.process)) continue;
        remove_guest_everywhere(static_cast<std::uint32_t>(i));
        release_owner(kFirstOwner + static_cast<std::uint32_t>(i));
        opener = {};
    }
    const std::uint64_t freed = header_->kept - before;
    if (freed > 0) release_excess(header_->budget);
    return freed;
}

void PageLedger::release_owner(std::uint32_t owner) {
    Header& h = *header_;
    std::uint64_t freed = 0;
    for (std::uint64_t page = 0; page < h.touched; ++page) {
        if (owners_[page] != owner) continue;
        if (has_guest(page)) {
            owners_[page] = kOrphan;
            ++h.orphans;
            continue;
        }
        owners_[page] = kKept;
        h.lowest_free = std::min(h.lowest_free, page);
        ++freed;
    }
    h.held -= freed;
    h.kept += freed;
}

bool PageLedger::has_guest(std::uint64_t page) const noexcept { return header_->guest_pages > 0 && any_guest(page); }

bool PageLedger::any_guest(std::uint64_t page) const noexcept {
    const std::uint64_t* const words = guests_ + page * kGuestWords;
    return std::any_of(words, words + kGuestWords, [](std::uint64_t word) { return word != 0; });
}

void PageLedger::remove_guest(std::uint64_t page, std::uint32_t place) noexcept {
    Header& h = *header_;
    std::uint64_t& word = guests_[page * kGuestWords + place / 64];
    const std::uint64_t bit = std::uint64_t{1} << (place % 64);
    if ((word & bit) == 0) return;
    word &= ~bit;
    --h.openers[place].num_held;
    if (has_guest(page)) return;
    --h.guest_pages;
    ++h.departures;
    if (owners_[page] != kOrphan) return;
    owners_[page] = kKept;
    --h.orphans;
    --h.held;
    ++h.kept;
    h.lowest_free = std::min(h.lowest_free, page);
}

void PageLedger::remove_guest_everywhere(std::uint32_t place) noexcept {
    for (std::uint64_t page = 0; header_->openers[place].num_held > 0 && page < header_->touched; ++page) remove_guest(page, place);
}

// A kept page if there is one, so that memory is reused; else the lowest hole. There is one: held < budget <= capacity.
std::uint32_t PageLedger::find_free() {
    Header& h = *header_;
    std::uint64_t page = h.lowest_free;
    while (owners_[page] >= kFirstOwner) ++page;
    h.lowest_free = page;
    if (h.kept > 0) {
        while (owners_[page] != kKept) ++page;
    }
    return static_cast<std::uint32_t>(page);
}

void PageLedger::own(std::uint32_t page) {
    Header& h = *header_;
    if (owners_[page] == kKept) --h.kept;
    h.touched = std::max<std::uint64_t>(h.touched, page + 1);
    owners_[page] = self_;
    ++h.held;
}

// Release kept pages, highest first, until held + kept <= allowed (or nothing is kept).
void PageLedger::release_excess(std::uint64_t allowed) {
    Header& h = *header_;
    for (std::uint64_t page = h.touched; h.kept > 0 && h.held + h.kept > allowed && page-- > 0;) {
        if (owners_[page] != kKept) continue;
        std::uint64_t first = page;  // a run of kept pages goes by one call
        std::uint64_t excess = std::min(h.held + h.kept - allowed, h.kept);
        while (page - first + 1 < excess && first > 0 && owners_[first - 1] == kKept) --first;
        const std::uint64_t count = page - first + 1;
        source_->release(first * h.page_bytes, count * h.page_bytes);
        std::fill(owners_ + first, owners_ + page + 1, kHole);
        h.kept -= count;
        page = first;
    }
}

}  // namespace poolweave
