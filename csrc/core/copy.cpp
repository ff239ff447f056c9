#include "core/copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/checksum.hpp"
#include "core/error.hpp"
#include "core/stream_copy.hpp"

namespace poolweave {
namespace {

// After each piece the lease is looked at. One that is hashed and then copied is read from the cache the second time.
constexpr std::uint64_t kCachedPiece = 64u << 10;
constexpr std::uint64_t kPlainPiece = 1u << 20;
constexpr std::uint64_t kStreamedTotal = 2u << 20;  // a copy of this size does not stay in a cache anyway
constexpr std::uint64_t kBytesPerThread = 4u << 20;  // below this, starting a thread costs more than it saves
constexpr std::uint64_t kStretch = 2u << 20;  // what a thread takes at once: one that lost its core holds up no more than this

void* pointer(std::uint64_t address) noexcept { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

unsigned useful_threads(unsigned wanted, std::uint64_t nbytes) {
    const std::uint64_t most = std::max<std::uint64_t>(1, nbytes / kBytesPerThread);
    return static_cast<unsigned>(std::clamp<std::uint64_t>(wanted, 1, most));
}

// Runs work(i) for i in [0, threads) and rethrows the first exception; work 0 runs on the calling thread.
template <typename Work>
void fan_out(unsigned threads, const Work& work) {
    std::vector<std::exception_ptr> errors(threads);
    const auto run = [&](unsigned i) {
        try {
            work(i);
        } catch (...) {
            errors[i] = std::current_exception();
        }
    };
    std::vector<std::jthread> others;
    for (unsigned i = 1; i < threads; ++i) {
        try {
            others.emplace_back(run, i);
        } catch (const std::system_error&) {
            run(i);  // no thread to be had: slower, not wrong
        }
    }
    run(0);
    others.clear();
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

class Mover {
  public:
    Mover(const Guard& guard, bool hashing, bool streaming)
        : guard_(guard), piece_(hashing && !streaming ? kCachedPiece : kPlainPiece), streaming_(streaming) {}

    // Copies bytes [low, high) of one block; false when the guard no longer holds.
    bool move(std::span<const Run> from, std::span<const Run> to, std::uint64_t low, std::uint64_t high, Hasher* hasher) {
        Cursor source(from, low), target(to, low);
        for (std::uint64_t left = high - low; left > 0;) {
            const std::uint64_t n = std::min({left, piece_, source.left(), target.left()});
            copy(pointer(target.address()), pointer(source.address()), n, hasher);
            source.advance(n);
            target.advance(n);
            left -= n;
            since_check_ += n;
            if (since_check_ >= piece_ && !check()) return false;
        }
        return true;
    }

    bool check() {
        since_check_ = 0;
        return !(guard_.abort != nullptr && guard_.abort->is_set()) && holds(guard_);
    }

  private:
    // Hashed at the source: should its owner write between the two reads, the lease is over.
    void copy(void* target, const void* source, std::size_t nbytes, Hasher* hasher) const noexcept {
        if (streaming_) {
            hasher != nullptr ? hasher->copy(target, source, nbytes) : stream_copy(target, source, nbytes);
            return;
        }
        if (hasher != nullptr) hasher->update(source, nbytes);
        std::memcpy(target, source, nbytes);
    }

    class Cursor {
      public:
        Cursor(std::span<const Run> runs, std::uint64_t skip) : runs_(runs) {
            while (index_ < runs_.size() && skip >= runs_[index_].nbytes) skip -= runs_[index_++].nbytes;
            offset_ = skip;
        }
        std::uint64_t address() const noexcept { return runs_[index_].address + offset_; }
        std::uint64_t left() const noexcept { return runs_[index_].nbytes - offset_; }
        void advance(std::uint64_t n) noexcept {
            offset_ += n;
            if (offset_ == runs_[index_].nbytes) {
                ++index_;
                offset_ = 0;
            }
        }

      private:
        std::span<const Run> runs_;
        std::size_t index_ = 0;
        std::uint64_t offset_ = 0;
    };

    const Guard& guard_;
    std::uint64_t piece_;
    bool streaming_;
    std::uint64_t since_check_ = 0;
};

void check_range(const Extents& extents, std::size_t first, std::size_t count) {
    if (first > extents.num_blocks() || count > extents.num_blocks() - first) {
        throw Error(Code::kConfig, "blocks " + std::to_string(first) + " + " + std::to_string(count) + " leave the " +
                                       std::to_string(extents.num_blocks()) + " blocks of the extents");
    }
}

Outcome outcome(const Guard& guard, bool whole) {
    if (guard.abort != nullptr && guard.abort->is_set()) return Outcome::kAborted;
    return whole && holds(guard) ? Outcome::kDone : Outcome::kRevoked;
}

}  // namespace

bool holds(const Guard& guard) noexcept {
    if (guard.word == nullptr) return true;
    // Orders the copy's reads before the word's: a word that still stands covers every byte read before it.
    std::atomic_thread_fence(std::memory_order_acquire);
    return guard.word->load(std::memory_order_acquire) == guard.lease;
}

Outcome copy_blocks(const Extents& from, const Extents& to, std::size_t first, std::size_t count, unsigned threads,
                    const Guard& guard, std::uint64_t* hashes) {
    check_range(from, first, count);
    check_range(to, first, count);
    if (count != 0 && from.block_bytes() != to.block_bytes()) {
        throw Error(Code::kConfig, "blocks of " + std::to_string(from.block_bytes()) + " bytes do not fit blocks of " +
                                       std::to_string(to.block_bytes()));
    }
    const std::uint64_t size = from.block_bytes();
    const std::uint64_t total = size * count;
    // Hashes are made block by block, so only plain copies can be cut inside a block.
    const std::uint64_t unit = hashes != nullptr ? size : 1;
    const std::uint64_t units = unit == 0 ? 0 : total / unit;
    const unsigned used = hashes != nullptr
                              ? std::min(useful_threads(threads, total), static_cast<unsigned>(std::max<std::size_t>(count, 1)))
                              : useful_threads(threads, total);
    const std::uint64_t stretch = std::max<std::uint64_t>(1, kStretch / std::max<std::uint64_t>(unit, 1));
    std::vector<char> whole(used, 1);
    std::atomic<std::uint64_t> next{0};
    fan_out(used, [&](unsigned i) {
        Mover mover(guard, hashes != nullptr, total >= kStreamedTotal);
        Hasher hasher;
        for (std::uint64_t begin; (begin = next.fetch_add(stretch, std::memory_order_relaxed)) < units;) {
            const std::uint64_t end = std::min(units, begin + stretch) * unit;
            for (std::uint64_t at = begin * unit; at < end;) {
                const std::size_t block = static_cast<std::size_t>(at / size);
                const std::uint64_t low = at - block * size, high = std::min(size, end - block * size);
                if (hashes != nullptr) hasher.reset();
                Hasher* const sum = hashes != nullptr ? &hasher : nullptr;
                if (!mover.move(from.runs_of(first + block), to.runs_of(first + block), low, high, sum)) {
                    whole[i] = 0;
                    return;
                }
                if (hashes != nullptr) hashes[block] = hasher.digest();
                at += high - low;
            }
        }
    });
    return outcome(guard, std::all_of(whole.begin(), whole.end(), [](char one) { return one != 0; }));
}

void hash_blocks(const Extents& extents, std::size_t first, std::size_t count, unsigned threads, std::uint64_t* hashes) {
    check_range(extents, first, count);
    const unsigned used = std::min(useful_threads(threads, extents.block_bytes() * count),
                                   static_cast<unsigned>(std::max<std::size_t>(count, 1)));
    const std::size_t stretch = std::max<std::uint64_t>(1, kStretch / std::max<std::uint64_t>(extents.block_bytes(), 1));
    std::atomic<std::size_t> next{0};
    fan_out(used, [&](unsigned) {
        Hasher hasher;
        for (std::size_t begin; (begin = next.fetch_add(stretch, std::memory_order_relaxed)) < count;) {
            for (std::size_t block = begin; block < std::min(count, begin + stretch); ++block) {
                const auto runs = extents.runs_of(first + block);
                if (runs.size() == 1) {
                    hashes[block] = checksum(pointer(runs[0].address), runs[0].nbytes);
                    continue;
                }
                hasher.reset();
                for (const Run& run : runs) hasher.update(pointer(run.address), run.nbytes);
                hashes[block] = hasher.digest();
            }
        }
    });
}

}  // namespace poolweave
