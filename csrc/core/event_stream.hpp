// One source's batches of KV events in the order of their sequence numbers: applies the next one to the event index and
// remembers what the last ones were, which tells a batch that is repeated from one of another life of the source.
//
// Threads: one owner; the two counters may be read by any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/event_index.hpp"

namespace poolweave {

class EventStream {
  public:
    // `index` and its source outlive the stream.
    EventStream(EventIndex& index, std::uint32_t source) noexcept : index_(index), source_(source) {}

    // Applies the batch that has the number next_sequence(). Says what it did only where somebody has to look at that:
    // nothing when its blocks were stored and removed as told. Throws Error(kMalformed) and then changes nothing but
    // num_batches().
    std::optional<EventReport> follow(std::string_view payload);

    // The batch under this number was exactly `payload`; false when it is no longer remembered.
    bool followed(std::uint64_t sequence, std::string_view payload) const noexcept;

    // Forgets all that the source holds and told; `sequence` is expected next.
    void begin_anew(std::uint64_t sequence);

    void set_trusted(bool trusted) { index_.set_trusted(source_, trusted); }

    std::uint64_t next_sequence() const noexcept { return next_.load(std::memory_order_relaxed); }
    std::uint64_t num_batches() const noexcept { return num_batches_.load(std::memory_order_relaxed); }

  private:
    static constexpr std::size_t kRemembered = 4096;  // batches

    EventIndex& index_;
    std::uint32_t source_;
    std::atomic<std::uint64_t> next_{0};
    std::atomic<std::uint64_t> num_batches_{0};  // given to follow(), malformed ones too
    std::uint64_t first_ = 0;                    // the oldest batch since it began
    std::vector<std::uint64_t> digests_;         // of batch first_ + i, in a ring once it has kRemembered
};

}  // namespace poolweave
