// The instances that may take a prompt: what each holds of it, what it has to do, what the prompt would take there.
// Arrays of one entry a candidate. Knows no cost model and no policy: these price and choose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/prompt_tree.hpp"

namespace poolweave {

class Candidates {
  public:
    // `pending_s` and, unless all are equally fast, `slowness` have an entry a slot. Throws Error(kConfig) for a slot beyond them.
    Candidates(std::span<const std::int64_t> slots, std::span<const double> pending_s, std::span<const double> slowness);
    // As they are.
    Candidates(std::vector<std::int64_t> slots, std::vector<std::int32_t> held_tokens, std::vector<double> queued_s, std::vector<double> own_s, double uncached_s);

    // Adds the leading tokens that each is believed to hold by this tree.
    void score(PromptTree& tree, std::span<const std::uint64_t> keys, double now, std::int32_t block_tokens);
    // What is held counts by this share, an entry a slot, in whole blocks.
    void believe(std::span<const double> credit, std::int32_t block_tokens);
    // The different numbers of tokens that are held, ascending.
    std::vector<std::int32_t> distinct() const;
    // `own_s`: a prompt's time for each of distinct(); `uncached_s`: where nothing is held; both at slowness 1.
    void price(std::span<const double> own_s, double uncached_s);

    std::size_t size() const noexcept { return slots_.size(); }
    std::int32_t longest() const noexcept;
    std::span<const std::int64_t> slots() const noexcept { return slots_; }
    std::span<std::int32_t> held_tokens() noexcept { return held_; }
    std::span<double> queued_s() noexcept { return queued_s_; }
    std::span<double> own_s() noexcept { return own_s_; }
    // How unlike they are where nothing is held, up to a constant: 0 where all are equally fast.
    std::span<double> uncached_s() noexcept { return uncached_s_; }

    // The lowest, of equal ones by `lot` (lowest.hpp): of what is queued, of that and the prompt's own time, of that and
    // the time it would take with nothing held.
    std::size_t draw_queued(std::uint64_t lot) const noexcept;
    std::size_t draw_predicted(std::uint64_t lot) const;
    std::size_t draw_uncached(std::uint64_t lot) const;

  private:
    std::vector<std::int64_t> slots_;
    std::vector<std::int32_t> held_;
    std::vector<double> queued_s_;
    std::vector<double> own_s_;
    std::vector<double> uncached_s_;
    std::vector<double> slowness_;  // empty: 1
};

}  // namespace poolweave
