// One control connection: whole frames in and out of a non-blocking stream socket, descriptors passed along.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/frame.hpp"
#include "core/lookout.hpp"

namespace poolweave {

// Borrows the socket. send(), flush() and close() from any thread; the rest by one reader at a time.
class Channel {
  public:
    static constexpr std::size_t kMostQueued = 4 * kFrameLimit;  // a peer that reads this little is as good as lost
    static constexpr std::size_t kMostDescriptors = 16;

    Channel(int fd, FrameKey key);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // The greeting is over: frames of the full size, under the session's keys if there are any, and no descriptors.
    void rekey(FrameKey send, FrameKey receive);
    // The connection is being made: frames wait until flush().
    void hold();

    // Sends a frame as far as the socket takes it. Returns how many bytes wait for flush(). Throws kOs when the
    // connection is lost, kClosed after close(), kTransfer when too much waits, kProtocol for too long a payload.
    std::size_t send(Bytes payload, std::span<const int> descriptors);
    // The same for what waits.
    std::size_t flush();
    // After it returns the socket is not used any more.
    void close();

    enum class Read { kNothing, kSome, kEnd };
    // Takes in what has come, once. Throws kOs, kProtocol for more descriptors than a greeting has.
    Read read();
    // The next whole payload of what was taken in; as FrameDecoder::next().
    std::optional<Bytes> next() { return decoder_.next(); }
    std::size_t buffered() const noexcept { return decoder_.buffered(); }
    // The descriptors that came since the last call; the caller's to close.
    std::vector<int> take_descriptors();
    // Waits for something to read: `look` without sleeping, where that pays (see Lookout), then `sleep` asleep. False when
    // nothing came, true for a signal too.
    bool watch(std::chrono::nanoseconds look, std::chrono::nanoseconds sleep);

  private:
    struct Piece {
        std::vector<std::byte> bytes;
        std::vector<int> descriptors;
        std::size_t sent = 0;
    };

    std::size_t write(Bytes head, Bytes payload, std::span<const int> descriptors);

    const int fd_;
    std::mutex mutex_;  // of the writing half
    FrameEncoder encoder_;
    std::deque<Piece> queue_;
    std::size_t queued_ = 0;
    bool held_ = false;
    bool closed_ = false;

    FrameDecoder decoder_;
    std::vector<int> descriptors_;
    bool takes_descriptors_ = true;
    Lookout lookout_;
};

// What epoll_wait() gives.
struct Ready {
    int fd;
    std::uint32_t events;
};

// Waits on an epoll descriptor, which it borrows. For one thread.
class Poller {
  public:
    explicit Poller(int epoll) : epoll_(epoll) {}

    // `look` without sleeping, where that pays, then up to `timeout` asleep (negative: for ever). Writes what is ready into
    // `out`; returns how many. Throws kOs.
    std::size_t wait(std::chrono::nanoseconds look, std::chrono::nanoseconds timeout, std::span<Ready> out);

  private:
    const int epoll_;
    Lookout lookout_;
};

}  // namespace poolweave
