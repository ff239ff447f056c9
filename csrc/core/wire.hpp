// Whole messages and scattered bytes over one socket, each wait bounded by a stall and a deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/abort.hpp"
#include "core/extents.hpp"

namespace poolweave {

using Clock = std::chrono::steady_clock;

// How long a wait may last: `stall` between two bytes, `deadline` in all; `abort` (may be null) ends it at once.
struct Patience {
    std::chrono::nanoseconds stall;
    Clock::time_point deadline;
    const Abort* abort = nullptr;
};

// Owns a connected stream socket. Not thread-safe but for shut_down(), which any thread may call to end a wait.
// All calls throw kTransfer when the peer closes, stalls or resets, and kClosed when `abort` is set.
class Wire {
  public:
    explicit Wire(int fd);  // takes ownership; sets how long a call blocks, and TCP_NODELAY where it is TCP
    ~Wire();
    Wire(const Wire&) = delete;
    Wire& operator=(const Wire&) = delete;

    void send(std::span<const std::byte> bytes, const Patience& patience);
    // Sends `head`, then bytes [offset, offset + nbytes) of the stream that `extents` is, in gathered calls.
    void send(std::span<const std::byte> head, const Extents& extents, std::uint64_t offset, std::uint64_t nbytes,
              const Patience& patience);
    void receive(std::span<std::byte> bytes, const Patience& patience);
    // Receives at most `nbytes` (at least one) into the stream position `offset` of `extents`; returns how many.
    std::uint64_t receive_some(const Extents& extents, std::uint64_t offset, std::uint64_t nbytes, const Patience& patience);
    // Waits for the first byte of a message; false when the peer closed or nothing came in time.
    bool wait_readable(const Patience& patience);

    void shut_down() noexcept;
    int fd() const noexcept { return fd_; }

  private:
    void wait(short events, const Patience& patience);

    int fd_;
};

}  // namespace poolweave
