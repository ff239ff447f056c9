#include "core/decode/board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::uint64_t kMagic = 0x31'6472'616f'6277'70ULL;
constexpr std::chrono::microseconds kIdle(50);      // spin with no batch on its way
constexpr std::chrono::microseconds kFlying(2000);  // spin with one: waking from the kernel costs 30-90 us a hop

[[noreturn]] void fail(const std::string& what) {
    throw Error(Code::kOs, what + " failed: errno " + std::to_string(errno), {errno});
}

Ranks others_of(const Slot& slot) noexcept { return static_cast<Ranks>(slot.group & ~(1U << slot.attention)); }

void ring_attention(BoardHeader& header, Ranks ranks) noexcept {
    for (int rank = next_rank(ranks, -1); rank >= 0; rank = next_rank(ranks, rank)) header.attention[rank].ring();
}

void check(const BoardShape& s) {
    const bool fits = s.slots > 0 && s.max_rows > 0 && s.max_rows <= kMaxRows && s.seats > 0 && s.max_tokens > 0 &&
                      s.block_tokens > 0 && s.max_hidden > 0 && s.models > 0 && s.width > 0 && s.width <= kMaxRanks;
    if (!fits)
        throw Error(Code::kConfig, "a board has positive sizes and at most " + std::to_string(kMaxRows) + " rows a batch");
}

}  // namespace

std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Board Board::create(const BoardShape& shape) {
    check(shape);
    const int fd = memfd_create("poolweave-board", MFD_CLOEXEC);
    if (fd < 0) fail("memfd_create");
    Board board(fd, nullptr, 0);  // owns the descriptor from here on
    const std::size_t nbytes = board.lay_out(shape);
    if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0) fail("ftruncate");
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) fail("mmap");
    board.base_ = static_cast<std::byte*>(base), board.nbytes_ = nbytes;
    board.lay_out(shape);
    board.header().in_flight.store(2);
    board.header().shape = shape;
    board.header().magic = kMagic;
    return board;
}

Board Board::attach(int fd) {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) fail("dup");
    Board board(own, nullptr, 0);
    struct stat status {};
    if (fstat(own, &status) != 0) fail("fstat");
    const auto nbytes = static_cast<std::size_t>(status.st_size);
    if (nbytes < sizeof(BoardHeader)) throw Error(Code::kConfig, "this descriptor is no board");
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
    if (base == MAP_FAILED) fail("mmap");
    board.base_ = static_cast<std::byte*>(base), board.nbytes_ = nbytes;
    if (board.header().magic != kMagic || board.lay_out(board.shape()) != nbytes)
        throw Error(Code::kConfig, "this descriptor is no board");
    return board;
}

Board::Board(int fd, std::byte* base, std::size_t nbytes) : fd_(fd), base_(base), nbytes_(nbytes) {}

Board::Board(Board&& other) noexcept : Board(other.fd_, other.base_, other.nbytes_) {
    if (base_ != nullptr) lay_out(shape());
    other.fd_ = -1;
    other.base_ = nullptr;
}

Board::~Board() {
    if (base_ != nullptr) munmap(base_, nbytes_);
    if (fd_ >= 0) close(fd_);
}

std::size_t Board::lay_out(const BoardShape& shape) {
    std::size_t end = 0;
    const auto place = [&]<class T>(T*& start, std::size_t count) {
        end = (end + 63) / 64 * 64;
        start = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + end);
        end += count * sizeof(T);
    };
    BoardHeader* header = nullptr;
    const std::size_t seats = shape.seats, tokens = seats * shape.max_tokens;
    const std::size_t blocks = (shape.max_tokens + shape.block_tokens - 1) / shape.block_tokens;
    const std::size_t mailbox = static_cast<std::size_t>(shape.slots) * shape.max_rows * shape.max_hidden;
    place(header, 1);
    place(models_, shape.models);
    place(slots_, shape.slots);
    place(seats_, seats);
    place(stamps_, tokens);
    place(events_, static_cast<std::size_t>(shape.events) * 2 * kMaxRanks);
    place(tokens_, tokens);
    place(tables_, seats * shape.width * blocks);
    place(normed_, mailbox);
    place(delta_, mailbox);
    place(partials_, shape.width > 1 ? mailbox * 2 * shape.width : 0);
    return end;
}

void Board::record(std::size_t worker, std::int64_t slot, std::int64_t start_ns) const noexcept {
    const std::span<Event> kept = events(worker);
    if (kept.empty()) return;
    std::atomic<std::uint64_t>& count = header().events[worker];
    const std::uint64_t number = count.load(std::memory_order_relaxed);
    const Slot& at = this->slot(slot);
    kept[number % kept.size()] = {start_ns, now_ns(), static_cast<std::int32_t>(slot), at.model, at.layer, at.rows};
    count.store(number + 1, std::memory_order_release);
}

void Board::pass_on(std::int64_t index, int rank) const noexcept {
    Slot& at = slot(index);
    const int next = next_rank(model(at.model).owners[at.layer], rank);
    at.ticket = next_ticket();
    if (next >= 0) {
        at.turn.store(turn_of_rank(next), std::memory_order_release);
        header().ffn[next].ring();
        return;
    }
    at.layer += 1;
    const Ranks resting = at.layer == model(at.model).num_layers ? others_of(at) : Ranks{0};  // the leader samples
    const Ranks working = static_cast<Ranks>(at.group & ~resting);
    at.arrived.store(resting, std::memory_order_relaxed);
    at.turn.store(Turn::kAttention, std::memory_order_release);
    ring_attention(header(), working);
}

bool Board::arrive(std::int64_t index, int rank) const noexcept {
    Slot& at = slot(index);
    const std::uint32_t own = 1U << rank;
    std::uint32_t seen = at.arrived.load(std::memory_order_acquire);
    do {
        // The last one's bit stays unset: so long it has the slot in hand.
        if ((seen | own) == at.group) return true;
    } while (!at.arrived.compare_exchange_weak(seen, seen | own, std::memory_order_acq_rel, std::memory_order_acquire));
    return false;
}

void Board::open_to_group(std::int64_t index) const noexcept {
    Slot& at = slot(index);
    const Ranks others = others_of(at);
    at.arrived.store(0, std::memory_order_release);
    ring_attention(header(), others);
}

std::chrono::microseconds Board::patience() const noexcept {
    for (std::uint32_t i = 0; i < shape().slots; ++i) {
        const Turn turn = slot(i).turn.load(std::memory_order_acquire);
        if (turn == Turn::kAttention || turn >= Turn::kFfn) return kFlying;
    }
    return kIdle;
}

bool Board::take(std::int64_t index) const noexcept {
    Turn ready = Turn::kReady;
    return slot(index).turn.compare_exchange_strong(ready, Turn::kHost);
}

void Board::abort() const noexcept {
    header().abort.store(1, std::memory_order_release);
    header().host.ring();
    for (Bell& bell : header().attention) bell.ring();
    for (Bell& bell : header().ffn) bell.ring();
}

}  // namespace poolweave::decode
