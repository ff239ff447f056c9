#include "core/decode/hidden_link.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/error.hpp"

namespace poolweave::decode {

namespace {

constexpr std::uint32_t kMagic = 0x6b6c'7770;
constexpr std::int64_t kLookUpMs = 200;  // how often a sleeping thread looks whether the link was shut
constexpr std::chrono::microseconds kSpin(50);

}  // namespace

HiddenLink::HiddenLink(const Board& board, int fd, int rank, LinkEnd end)
    : board_(board), fd_(fd), rank_(rank), end_(end), hosted_(board.shape().slots) {
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // a Unix socket has no such delay, and refuses
    if (rank < 0 || rank >= static_cast<int>(kMaxRanks)) {
        close(fd_);
        throw Error(Code::kConfig, "FFN rank " + std::to_string(rank) + " of at most " + std::to_string(kMaxRanks));
    }
}

HiddenLink::~HiddenLink() { close(fd_); }

void HiddenLink::shut() noexcept {
    shut_.store(true);
    shutdown(fd_, SHUT_RDWR);
    bell().ring();
    back_.ring();
}

Turn HiddenLink::outgoing() const noexcept { return end_ == LinkEnd::kAttention ? turn_of_rank(rank_) : Turn::kAttention; }

Bell& HiddenLink::bell() const noexcept {
    return end_ == LinkEnd::kAttention ? board_.header().ffn[rank_] : board_.header().attention[0];
}

void HiddenLink::send() {
    Waiter waiter;
    while (!board_.aborted() && !shut_.load()) {
        const std::uint32_t seen = bell().rung.load(std::memory_order_acquire);
        while (ship_next()) {}
        waiter.rest(bell(), seen, kLookUpMs, kSpin);
    }
    shut();
}

// The oldest slot that is ours to send, if there is one and the connection lives.
bool HiddenLink::ship_next() {
    std::int64_t found = -1;
    for (std::int64_t i = 0; i < board_.shape().slots; ++i) {
        const Slot& slot = board_.slot(i);
        if (slot.turn.load(std::memory_order_acquire) != outgoing()) continue;
        if (found < 0 || slot.ticket < board_.slot(found).ticket) found = i;
    }
    if (found < 0) return false;
    // Before it is sent: the answer, and at the far end the slot's next frame, may be here before `ship` returns.
    board_.slot(found).turn.store(end_ == LinkEnd::kAttention ? away_at_rank(rank_) : Turn::kIdle, std::memory_order_release);
    return ship(found);
}

bool HiddenLink::ship(std::int64_t index) {
    const Slot& slot = board_.slot(index);
    const bool there = end_ == LinkEnd::kAttention;
    const bool onto = there && next_rank(board_.model(slot.model).owners[slot.layer], -1) < rank_;
    const std::uint32_t hidden = board_.shape().max_hidden;
    const Frame frame{kMagic, static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(slot.model),
                      static_cast<std::uint32_t>(slot.layer), static_cast<std::uint32_t>(slot.rows), hidden,
                      static_cast<std::uint32_t>(slot.attention), onto ? 1U : 0U};
    const std::size_t nbytes = sizeof(float) * slot.rows * hidden;
    const std::lock_guard lock(sending_);
    return write(&frame, sizeof frame) && (!there || write(board_.normed(index), nbytes)) &&
           ((there && !onto) || write(board_.delta(index), nbytes));
}

void HiddenLink::receive() {
    Frame frame;
    while (!board_.aborted() && read(&frame, sizeof frame)) {
        try {
            check(frame);
        } catch (...) {
            shut();
            throw;
        }
        const std::size_t nbytes = sizeof(float) * frame.rows * frame.hidden;
        const bool at_ffn = end_ == LinkEnd::kFfn;
        if (at_ffn && !read(board_.normed(frame.slot), nbytes)) break;
        if ((!at_ffn || frame.onto != 0) && !read(board_.delta(frame.slot), nbytes)) break;
        at_ffn ? arrive_at_ffn(frame) : arrive_at_attention(frame);
    }
    shut();
}

void HiddenLink::check(const Frame& frame) const {
    const BoardShape& shape = board_.shape();
    const bool fits = frame.magic == kMagic && frame.slot < shape.slots && frame.rows <= shape.max_rows && frame.hidden == shape.max_hidden;
    if (!fits || !(end_ == LinkEnd::kFfn ? is_question(frame) : is_answer(frame)))
        throw Error(Code::kConfig, "a frame of slot " + std::to_string(frame.slot) + " does not fit this board or was not awaited");
}

bool HiddenLink::is_question(const Frame& frame) const noexcept {
    return frame.rows > 0 && frame.model < board_.shape().models && frame.layer < kMaxLayers && frame.attention < kMaxRanks &&
           board_.slot(frame.slot).turn.load(std::memory_order_acquire) == Turn::kIdle;
}

// To what was sent: the same rows, at the next layer. Else other numbers than the FFN's would be added, and nobody see it.
bool HiddenLink::is_answer(const Frame& frame) const noexcept {
    const Slot& slot = board_.slot(frame.slot);
    const bool awaited = slot.turn.load(std::memory_order_acquire) == away_at_rank(rank_) || hosted_[frame.slot].load();
    return awaited && static_cast<std::int64_t>(frame.model) == slot.model && static_cast<std::int64_t>(frame.rows) == slot.rows &&
           static_cast<std::int64_t>(frame.layer) == slot.layer + std::int64_t{1};
}

void HiddenLink::arrive_at_ffn(const Frame& frame) {
    Slot& slot = board_.slot(frame.slot);
    // For the worker here: this rank alone, behind another where it is to add to what came.
    const auto owners = static_cast<Ranks>((1U << rank_) | (frame.onto != 0 ? 1U : 0U));
    Ranks& known = board_.model(frame.model).owners[frame.layer];
    if (known != owners) known = owners;
    slot.model = static_cast<std::int32_t>(frame.model), slot.layer = static_cast<std::int32_t>(frame.layer);
    slot.rows = static_cast<std::int32_t>(frame.rows), slot.attention = 0, slot.group = 1;  // all go back this way
    slot.ticket = board_.next_ticket();
    slot.turn.store(turn_of_rank(rank_), std::memory_order_release);
    board_.header().ffn[rank_].ring();
}

void HiddenLink::arrive_at_attention(const Frame& frame) {
    if (hosted_[frame.slot].exchange(false)) {
        back_.ring();
        return;
    }
    board_.pass_on(frame.slot, rank_);
}

void HiddenLink::step(std::int64_t index) {
    if (index < 0 || index >= board_.shape().slots) throw Error(Code::kConfig, "no slot " + std::to_string(index));
    hosted_[index].store(true);
    Waiter waiter;
    bool there = ship(index);
    while (there && hosted_[index].load()) {
        const std::uint32_t seen = back_.rung.load(std::memory_order_acquire);
        there = !shut_.load() && !board_.aborted();
        if (there && hosted_[index].load()) waiter.rest(back_, seen, kLookUpMs, kSpin);
    }
    if (!there) throw Error(Code::kOs, "the connection to FFN rank " + std::to_string(rank_) + " has ended");
}

bool HiddenLink::write(const void* data, std::size_t nbytes) {
    const char* from = static_cast<const char*>(data);
    while (nbytes > 0) {
        const ssize_t done = ::send(fd_, from, nbytes, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            shut();
            return false;
        }
        from += done, nbytes -= static_cast<std::size_t>(done);
    }
    return true;
}

bool HiddenLink::read(void* data, std::size_t nbytes) {
    char* into = static_cast<char*>(data);
    while (nbytes > 0) {
        const ssize_t done = recv(fd_, into, nbytes, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        into += done, nbytes -= static_cast<std::size_t>(done);
    }
    return true;
}

}  // namespace poolweave::decode
