#include "core/candidates.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "core/lowest.hpp"

namespace poolweave {

namespace {

std::size_t draw_sum(const std::vector<double>& one, const std::vector<double>& other, std::uint64_t lot) {
    std::vector<double> sums(one.size());
    std::transform(one.begin(), one.end(), other.begin(), sums.begin(), std::plus<>());
    return draw_lowest(sums, lot);
}

}  // namespace

Candidates::Candidates(std::span<const std::int64_t> slots, std::span<const double> pending_s, std::span<const double> slowness)
    : slots_(slots.begin(), slots.end()), held_(slots.size()), queued_s_(slots.size()), own_s_(slots.size()), uncached_s_(slots.size()) {
    if (slots.empty()) throw Error(Code::kConfig, "there must be at least one candidate");
    if (!slowness.empty()) slowness_.resize(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto slot = static_cast<std::size_t>(slots[i]);
        if (slot >= pending_s.size() || (!slowness.empty() && slot >= slowness.size())) {
            throw Error(Code::kConfig, "slot " + std::to_string(slots[i]) + " has no load; there are " + std::to_string(pending_s.size()));
        }
        queued_s_[i] = pending_s[slot];
        if (!slowness.empty()) slowness_[i] = slowness[slot];
    }
}

Candidates::Candidates(std::vector<std::int64_t> slots, std::vector<std::int32_t> held_tokens, std::vector<double> queued_s,
                       std::vector<double> own_s, double uncached_s)
    : slots_(std::move(slots)), held_(std::move(held_tokens)), queued_s_(std::move(queued_s)), own_s_(std::move(own_s)), uncached_s_(slots_.size(), uncached_s) {
    if (slots_.empty() || held_.size() != slots_.size() || queued_s_.size() != slots_.size() || own_s_.size() != slots_.size()) {
        throw Error(Code::kConfig, "there must be at least one candidate, and one entry of each kind for each");
    }
}

void Candidates::score(PromptTree& tree, std::span<const std::uint64_t> keys, double now, std::int32_t block_tokens) {
    std::vector<std::int32_t> scores(static_cast<std::size_t>(*std::max_element(slots_.begin(), slots_.end()) + 1));
    tree.match(keys, now, scores);
    for (std::size_t i = 0; i < slots_.size(); ++i) held_[i] += scores[static_cast<std::size_t>(slots_[i])] * block_tokens;
}

void Candidates::believe(std::span<const double> credit, std::int32_t block_tokens) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const double share = credit[static_cast<std::size_t>(slots_[i])];
        held_[i] = static_cast<std::int32_t>(static_cast<double>(held_[i] / block_tokens) * share) * block_tokens;
    }
}

std::vector<std::int32_t> Candidates::distinct() const {
    std::vector<std::int32_t> values;
    for (const std::int32_t held : held_) {
        if (values.empty() || values.back() != held) values.push_back(held);
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    return values;
}

void Candidates::price(std::span<const double> own_s, double uncached_s) {
    const std::vector<std::int32_t> values = distinct();
    if (own_s.size() != values.size()) throw Error(Code::kConfig, "there must be one time for each number of tokens held");
    for (std::size_t i = 0; i < held_.size(); ++i) {
        const double slow = slowness_.empty() ? 1.0 : slowness_[i];
        own_s_[i] = own_s[static_cast<std::size_t>(std::lower_bound(values.begin(), values.end(), held_[i]) - values.begin())] * slow;
        uncached_s_[i] = slowness_.empty() ? 0.0 : uncached_s * slow;
    }
}

std::int32_t Candidates::longest() const noexcept { return *std::max_element(held_.begin(), held_.end()); }

std::size_t Candidates::draw_queued(std::uint64_t lot) const noexcept { return draw_lowest(queued_s_, lot); }
std::size_t Candidates::draw_predicted(std::uint64_t lot) const { return draw_sum(queued_s_, own_s_, lot); }
std::size_t Candidates::draw_uncached(std::uint64_t lot) const { return draw_sum(queued_s_, uncached_s_, lot); }

}  // namespace poolweave
