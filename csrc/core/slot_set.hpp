// A set of small integers that gives its lowest members first: bits under a pyramid of summaries, 64 to one.
// Insert, erase and lowest cost one word a level; memory is 1.02 bits a member.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace poolweave {

class SlotSet {
  public:
    SlotSet() = default;
    SlotSet(const SlotSet&) = delete;
    SlotSet& operator=(const SlotSet&) = delete;

    // Room for members below `size`; never shrinks. New members are absent. Cost: one step a 64 members.
    void grow(std::size_t size) {
        const std::size_t words = (size + 63) / 64;
        if (words <= levels_[0].size()) return;
        levels_[0].resize(words, 0);
        levels_.resize(1);
        while (levels_.back().size() > 1) {
            const std::vector<std::uint64_t>& below = levels_.back();
            std::vector<std::uint64_t> summary((below.size() + 63) / 64, 0);
            for (std::size_t i = 0; i < below.size(); ++i) {
                if (below[i] != 0) summary[i / 64] |= std::uint64_t{1} << (i % 64);
            }
            levels_.push_back(std::move(summary));
        }
        words_ = levels_[0].data();
    }

    std::size_t count() const noexcept { return count_; }

    bool contains(std::size_t member) const noexcept {
        return member / 64 < levels_[0].size() && (levels_[0][member / 64] >> (member % 64) & 1) != 0;
    }

    void insert(std::size_t member) noexcept {
        ++count_;
        std::uint64_t& word = words_[member / 64];
        const bool linked = word != 0;
        word |= std::uint64_t{1} << (member % 64);
        if (!linked) link(member / 64);
    }

    void erase(std::size_t member) noexcept {
        --count_;
        std::uint64_t& word = words_[member / 64];
        word &= ~(std::uint64_t{1} << (member % 64));
        if (word == 0) unlink(member / 64);
    }

    // Move the `n` lowest members to `out`, ascending. There must be as many.
    template <typename Integer>
    void take_lowest(std::size_t n, Integer* out) noexcept {
        count_ -= n;
        while (n > 0) {
            std::size_t index = 0;
            for (std::size_t level = levels_.size() - 1; level > 0; --level) {
                index = index * 64 + static_cast<std::size_t>(std::countr_zero(levels_[level][index]));
            }
            std::uint64_t word = words_[index];
            for (; word != 0 && n > 0; --n, word &= word - 1) {
                *out++ = static_cast<Integer>(index * 64 + static_cast<std::size_t>(std::countr_zero(word)));
            }
            words_[index] = word;
            if (word == 0) unlink(index);
        }
    }

    // The longest run of neighbouring members. Cost: one step a word and a run.
    std::size_t longest_run() const noexcept {
        std::size_t longest = 0;
        std::size_t run = 0;
        for (const std::uint64_t word : levels_[0]) {
            if (word == ~std::uint64_t{0}) {
                run += 64;
                continue;
            }
            run += static_cast<std::size_t>(std::countr_one(word));
            longest = std::max(longest, run);
            for (std::uint64_t rest = word; rest != 0;) {
                rest >>= std::countr_zero(rest);
                const int length = std::countr_one(rest);
                longest = std::max(longest, static_cast<std::size_t>(length));
                rest = length == 64 ? 0 : rest >> length;
            }
            run = static_cast<std::size_t>(std::countl_one(word));
        }
        return std::max(longest, run);
    }

  private:
    void link(std::size_t member) noexcept {
        for (std::size_t level = 1; level < levels_.size(); ++level) {
            std::uint64_t& word = levels_[level][member / 64];
            const bool linked = word != 0;
            word |= std::uint64_t{1} << (member % 64);
            if (linked) return;
            member /= 64;
        }
    }

    void unlink(std::size_t member) noexcept {
        for (std::size_t level = 1; level < levels_.size(); ++level) {
            std::uint64_t& word = levels_[level][member / 64];
            word &= ~(std::uint64_t{1} << (member % 64));
            if (word != 0) return;
            member /= 64;
        }
    }

    std::vector<std::vector<std::uint64_t>> levels_{1};  // [0] holds the members, the last is one word
    std::uint64_t* words_ = nullptr;                         // of levels_[0]
    std::size_t count_ = 0;
};

}  // namespace poolweave
