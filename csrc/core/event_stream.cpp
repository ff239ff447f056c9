#include "core/event_stream.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace poolweave {

namespace {

std::uint64_t digest(std::string_view payload) noexcept { return XXH3_64bits(payload.data(), payload.size()); }

}  // namespace

std::optional<EventReport> EventStream::follow(std::string_view payload) {
    num_batches_.fetch_add(1, std::memory_order_relaxed);
    if (digests_.capacity() == 0) digests_.reserve(kRemembered);  // beforehand: nothing below may fail
    const EventReport report = index_.apply(source_, payload);
    const std::uint64_t sequence = next_sequence();
    if (digests_.size() < kRemembered) {
        digests_.push_back(digest(payload));
    } else {
        digests_[(sequence - first_) % kRemembered] = digest(payload);
    }
    next_.store(sequence + 1, std::memory_order_relaxed);
    if (report.uneventful()) return std::nullopt;
    return report;
}

bool EventStream::followed(std::uint64_t sequence, std::string_view payload) const noexcept {
    const std::uint64_t next = next_sequence();
    if (sequence < first_ || sequence >= next || next - sequence > kRemembered) return false;
    return digests_[(sequence - first_) % kRemembered] == digest(payload);
}

void EventStream::begin_anew(std::uint64_t sequence) {
    index_.clear(source_);
    digests_.clear();
    first_ = sequence;
    next_.store(sequence, std::memory_order_relaxed);
}

}  // namespace poolweave
