// The data plane over TCP: a receiver asks for bytes of an offer, the sender's server sends them chunk by chunk while
// the offer stands. Fixed little-endian frames, every length checked before it is used. Knows no control protocol.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>

#include "core/copy.hpp"
#include "core/extents.hpp"
#include "core/wire.hpp"

namespace poolweave {

struct StreamRequest;

// The sender's side. One thread a connection; connections end when the receiver closes, errs or idles. Thread-safe.
class StreamServer {
  public:
    struct Limits {
        std::chrono::nanoseconds stall;  // a chunk that does not move this long ends its connection
        std::chrono::nanoseconds idle;   // a connection without a request this long is closed
    };

    explicit StreamServer(const Limits& limits) : limits_(limits) {}
    ~StreamServer() { close(); }

    // Lets holders of `nonce` pull the blocks of `extents` until revoke() or `lifetime` is over.
    void publish(std::uint64_t offer, std::uint64_t nonce, std::shared_ptr<const Extents> extents,
                 std::chrono::nanoseconds lifetime);
    // After it returns no byte of the offer is read any more: chunks under way were finished or cut. Idempotent.
    void revoke(std::uint64_t offer);
    // Serves one connection; takes the descriptor over, also when it throws.
    void adopt(int fd);
    // Ends all connections and joins their threads. Idempotent.
    void close();

    std::size_t num_connections();
    std::uint64_t bytes_sent() const noexcept { return bytes_sent_.load(std::memory_order_relaxed); }

  private:
    struct Offer {
        std::uint64_t nonce;
        std::shared_ptr<const Extents> extents;
        Clock::time_point deadline;
        unsigned readers = 0;
        bool revoked = false;
    };
    struct Connection {
        explicit Connection(int fd) : wire(fd) {}
        Wire wire;
        std::uint64_t reading = 0;  // the offer whose bytes it sends now, 0 for none; under mutex_
        bool finished = false;      // under mutex_
        std::thread thread;
    };

    void serve(Connection& connection);
    bool answer(Connection& connection, const StreamRequest& request);
    std::shared_ptr<const Extents> begin_chunk(Connection& connection, const StreamRequest& request);
    void end_chunk(Connection& connection, std::uint64_t offer);
    void reap(std::unique_lock<std::mutex>& lock);

    const Limits limits_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<std::uint64_t, Offer> offers_;
    std::list<Connection> connections_;
    bool closed_ = false;
    std::atomic<std::uint64_t> bytes_sent_{0};
};

// The receiver's side of one connection.
struct Pull {
    std::uint64_t offer = 0;
    std::uint64_t nonce = 0;
    std::uint64_t first_block = 0;  // of the offer; the stream of `target` starts there
    std::uint32_t chunk_bytes = 1u << 20;
};

// Pulls all blocks of `target` over `wires` at once, a share each, blocks whole. kRevoked when the sender says that the
// offer no longer stands. `hashes` as in copy_blocks. Throws kTransfer on a stall, a cut or a malformed frame: the
// wires are then out of step and only good for closing.
Outcome pull_blocks(std::span<Wire* const> wires, const Pull& pull, const Extents& target, const Patience& patience,
                    std::uint64_t* hashes);

}  // namespace poolweave
