#include "core/stream.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <exception>
#include <string>
#include <vector>

#include "core/checksum.hpp"
#include "core/error.hpp"

namespace poolweave {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian as they lie in memory");

constexpr std::uint32_t kRequestMagic = 0x31515750;  // "PWQ1"
constexpr std::uint32_t kChunkMagic = 0x32435750;    // "PWC2"
constexpr std::uint32_t kMinChunk = 4u << 10;
constexpr std::uint32_t kMaxChunk = 64u << 20;
constexpr std::uint64_t kHashedPiece = 256u << 10;
constexpr std::size_t kUncutBlocks = 4;  // a connection; from there on whole blocks make even shares
constexpr std::chrono::milliseconds kGrace{20};

enum Status : std::uint32_t { kData = 0, kGone = 1, kBadRequest = 2 };

// As long as a cache line: the kernel copies bytes that lie elsewhere in a line than they did up to a fifth slower.
struct ChunkHead {
    std::uint32_t magic;
    std::uint32_t status;
    std::uint64_t offset;  // in the stream of the request
    std::uint64_t nbytes;
    std::array<std::uint64_t, 5> zeros{};
};
static_assert(sizeof(ChunkHead) == 64);

[[noreturn]] void fail(const std::string& what) { throw Error(Code::kTransfer, what); }

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
    return std::as_bytes(std::span(&value, 1));
}

}  // namespace

struct StreamRequest {
    std::uint32_t magic;
    std::uint32_t chunk_bytes;
    std::uint64_t offer;
    std::uint64_t nonce;
    std::uint64_t offset;  // bytes into the canonical stream of the offer
    std::uint64_t nbytes;
};
static_assert(sizeof(StreamRequest) == 40);

void StreamServer::publish(std::uint64_t offer, std::uint64_t nonce, std::shared_ptr<const Extents> extents,
                           std::chrono::nanoseconds lifetime) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(Code::kClosed, "the stream server is closed");
    offers_.insert_or_assign(offer, Offer{nonce, std::move(extents), Clock::now() + lifetime});
}

void StreamServer::revoke(std::uint64_t offer) {
    std::unique_lock lock(mutex_);
    const auto found = offers_.find(offer);
    if (found == offers_.end()) return;
    found->second.revoked = true;
    const auto unread = [&] {
        const auto now = offers_.find(offer);
        return now == offers_.end() || now->second.readers == 0;
    };
    // After the last chunk its thread needs a moment to say so; one whose receiver does not read is cut.
    if (!changed_.wait_for(lock, kGrace, unread)) {
        for (Connection& connection : connections_) {
            if (connection.reading == offer) connection.wire.shut_down();
        }
        changed_.wait(lock, unread);
    }
    offers_.erase(offer);
    changed_.notify_all();
}

void StreamServer::adopt(int fd) {
    std::unique_lock lock(mutex_);
    reap(lock);
    Connection& connection = connections_.emplace_back(fd);
    if (closed_) {
        connections_.pop_back();
        throw Error(Code::kClosed, "the stream server is closed");
    }
    try {
        connection.thread = std::thread([this, &connection] { serve(connection); });
    } catch (...) {
        connections_.pop_back();
        throw;
    }
}

void StreamServer::close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    for (auto& [id, offer] : offers_) offer.revoked = true;
    for (Connection& connection : connections_) connection.wire.shut_down();
    changed_.wait(lock, [&] {
        return std::all_of(connections_.begin(), connections_.end(), [](const Connection& one) { return one.finished; });
    });
    reap(lock);
    offers_.clear();
}

std::size_t StreamServer::num_connections() {
    std::unique_lock lock(mutex_);
    reap(lock);
    return connections_.size();
}

// Joins threads that have said they are finished: they touch nothing after that, so the lock may be held.
void StreamServer::reap(std::unique_lock<std::mutex>&) {
    for (auto it = connections_.begin(); it != connections_.end();) {
        if (it->finished) {
            it->thread.join();
            it = connections_.erase(it);
        } else {
            ++it;
        }
    }
}

void StreamServer::serve(Connection& connection) {
    try {
        for (;;) {
            if (!connection.wire.wait_readable({limits_.idle, Clock::now() + limits_.idle, nullptr})) break;
            StreamRequest request;
            connection.wire.receive(std::as_writable_bytes(std::span(&request, 1)),
                                    {limits_.stall, Clock::now() + limits_.stall, nullptr});
            if (!answer(connection, request)) break;
        }
    } catch (const Error&) {
        // The receiver went away, stalled or was cut: its own side reports it, ours only ends the connection.
    }
    connection.wire.shut_down();
    const std::lock_guard lock(mutex_);
    connection.finished = true;
    changed_.notify_all();
}

std::shared_ptr<const Extents> StreamServer::begin_chunk(Connection& connection, const StreamRequest& request) {
    const std::lock_guard lock(mutex_);
    const auto found = offers_.find(request.offer);
    if (found == offers_.end()) return nullptr;
    Offer& offer = found->second;
    if (offer.nonce != request.nonce || offer.revoked || Clock::now() >= offer.deadline) return nullptr;
    ++offer.readers;
    connection.reading = request.offer;
    return offer.extents;
}

void StreamServer::end_chunk(Connection& connection, std::uint64_t offer) {
    const std::lock_guard lock(mutex_);
    connection.reading = 0;
    --offers_.at(offer).readers;
    changed_.notify_all();
}

// False when the connection is to be closed.
bool StreamServer::answer(Connection& connection, const StreamRequest& request) {
    const Patience patience{limits_.stall, Clock::time_point::max(), nullptr};
    const bool sane = request.magic == kRequestMagic && request.chunk_bytes >= kMinChunk && request.chunk_bytes <= kMaxChunk;
    if (!sane) {
        connection.wire.send(bytes_of(ChunkHead{kChunkMagic, kBadRequest, 0, 0}), patience);
        return false;
    }
    for (std::uint64_t at = 0; at < request.nbytes;) {
        const auto extents = begin_chunk(connection, request);
        if (extents == nullptr) {
            connection.wire.send(bytes_of(ChunkHead{kChunkMagic, kGone, at, 0}), patience);
            return true;
        }
        const bool inside = request.offset <= extents->nbytes() && request.nbytes <= extents->nbytes() - request.offset;
        const std::uint64_t n = std::min<std::uint64_t>(request.chunk_bytes, request.nbytes - at);
        try {
            if (inside) {
                const ChunkHead head{kChunkMagic, kData, at, n};
                connection.wire.send(bytes_of(head), *extents, request.offset + at, n, patience);
            } else {
                connection.wire.send(bytes_of(ChunkHead{kChunkMagic, kBadRequest, at, 0}), patience);
            }
        } catch (...) {
            end_chunk(connection, request.offer);
            throw;
        }
        end_chunk(connection, request.offer);
        if (!inside) return false;
        bytes_sent_.fetch_add(n, std::memory_order_relaxed);
        at += n;
    }
    return true;
}

namespace {

// Receives a share of the stream of `target` and hashes the blocks that begin in it as their bytes come. Of a block that
// goes on in the next shares the rest is hashed by finish(), once all shares are in.
class Sink {
  public:
    Sink(const Extents& target, std::uint64_t begin, std::uint64_t* hashes)
        : target_(target), hashes_(hashes), first_((begin + target.block_bytes() - 1) / target.block_bytes() * target.block_bytes()) {}

    void take(Wire& wire, std::uint64_t at, std::uint64_t nbytes, const Patience& patience) {
        while (nbytes > 0) {
            const std::uint64_t most = hashes_ != nullptr ? std::min(nbytes, kHashedPiece) : nbytes;
            const std::uint64_t n = wire.receive_some(target_, at, most, patience);
            if (hashes_ != nullptr) hash(at, n);
            at += n;
            nbytes -= n;
        }
    }

    void finish(std::uint64_t end) {
        const std::uint64_t size = target_.block_bytes();
        if (hashes_ != nullptr && end > first_ && end % size != 0) hash(end, size - end % size);
    }

  private:
    void hash(std::uint64_t at, std::uint64_t nbytes) {
        const std::uint64_t size = target_.block_bytes();
        const std::uint64_t skipped = std::min(nbytes, first_ - std::min(at, first_));  // of a block that began before
        at += skipped;
        nbytes -= skipped;
        while (nbytes > 0) {
            const std::size_t block = static_cast<std::size_t>(at / size);
            const std::uint64_t inside = at - block * size, n = std::min(nbytes, size - inside);
            if (inside == 0) hasher_.reset();
            hash_block(block, inside, n);
            if (inside + n == size) hashes_[block] = hasher_.digest();
            at += n;
            nbytes -= n;
        }
    }

    void hash_block(std::size_t block, std::uint64_t skip, std::uint64_t nbytes) {
        for (const Run& run : target_.runs_of(block)) {
            if (nbytes == 0) return;
            if (skip >= run.nbytes) {
                skip -= run.nbytes;
                continue;
            }
            const std::uint64_t n = std::min(run.nbytes - skip, nbytes);
            hasher_.update(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(run.address + skip)), n);
            skip = 0;
            nbytes -= n;
        }
    }

    const Extents& target_;
    std::uint64_t* hashes_;
    std::uint64_t first_;
    Hasher hasher_;
};

Outcome pull_share(Wire& wire, const Pull& pull, const Extents& target, std::uint64_t begin, std::uint64_t end,
                   const Patience& patience, Sink& sink) {
    const StreamRequest request{kRequestMagic, pull.chunk_bytes, pull.offer, pull.nonce,
                          pull.first_block * target.block_bytes() + begin, end - begin};
    wire.send(bytes_of(request), patience);
    for (std::uint64_t at = begin; at < end;) {
        ChunkHead head;
        wire.receive(std::as_writable_bytes(std::span(&head, 1)), patience);
        if (head.magic != kChunkMagic || head.zeros != std::array<std::uint64_t, 5>{}) fail("a chunk began with wrong bytes: the stream is corrupt");
        if (head.status == kGone) return Outcome::kRevoked;
        if (head.status != kData) fail("the sender refused the request as malformed");
        if (head.offset != at - begin || head.nbytes == 0 || head.nbytes > pull.chunk_bytes || head.nbytes > end - at) {
            fail("a chunk claims bytes " + std::to_string(head.offset) + " + " + std::to_string(head.nbytes) +
                 " where " + std::to_string(at - begin) + " of " + std::to_string(end - begin) + " had arrived");
        }
        sink.take(wire, at, head.nbytes, patience);
        at += head.nbytes;
    }
    return Outcome::kDone;
}

}  // namespace

Outcome pull_blocks(std::span<Wire* const> wires, const Pull& pull, const Extents& target, const Patience& patience,
                    std::uint64_t* hashes) {
    if (wires.empty()) throw Error(Code::kConfig, "a pull needs at least one connection");
    if (target.num_blocks() == 0) return Outcome::kDone;
    // A hash is made by one wire, block by block; few large blocks are shared all the same, and their ends hashed later.
    const bool cut = hashes == nullptr || target.num_blocks() < kUncutBlocks * wires.size();
    const std::uint64_t unit = cut ? 1 : target.block_bytes();
    const std::uint64_t units = target.nbytes() / unit;
    const std::size_t used = static_cast<std::size_t>(std::min<std::uint64_t>(wires.size(), units));
    const auto end_of = [&](std::size_t i) { return units * (i + 1) / used * unit; };
    std::vector<Outcome> outcomes(used, Outcome::kDone);
    std::deque<Sink> sinks;
    for (std::size_t i = 0; i < used; ++i) sinks.emplace_back(target, i == 0 ? 0 : end_of(i - 1), hashes);
    std::mutex mutex;
    std::exception_ptr first;  // in time: the errors it causes on the other wires say nothing
    const auto share = [&](std::size_t i) {
        try {
            outcomes[i] = pull_share(*wires[i], pull, target, i == 0 ? 0 : end_of(i - 1), end_of(i), patience, sinks[i]);
        } catch (...) {
            const std::lock_guard lock(mutex);
            if (!first) first = std::current_exception();
            for (Wire* other : wires) other->shut_down();  // the pull has failed: nobody waits for the rest
        }
    };
    {
        std::vector<std::jthread> others;
        for (std::size_t i = 1; i < used; ++i) others.emplace_back(share, i);
        share(0);
    }
    if (first) std::rethrow_exception(first);
    const Outcome worst = *std::max_element(outcomes.begin(), outcomes.end());
    for (std::size_t i = 0; worst == Outcome::kDone && i < used; ++i) sinks[i].finish(end_of(i));
    return worst;
}

}  // namespace poolweave
