// An open-addressing table from 64-bit keys to 32-bit values that stores 8 bytes an entry: it keeps only 32 bits of
// each key, so a caller verifies what `find` offers. Entries may repeat.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poolweave {

class KeyTable {
  public:
    static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

    KeyTable();

    std::size_t size() const noexcept { return size_; }
    std::size_t nbytes() const noexcept { return slots_.size() * sizeof(Slot); }
    // How many more entries fit before the table doubles.
    std::size_t room() const noexcept { return limit(slots_.size()) - size_; }
    // nbytes() after growing to hold `extra` entries more.
    std::size_t nbytes_with(std::size_t extra) const noexcept;

    void reserve(std::size_t extra);
    void insert(std::uint64_t key, std::uint32_t value);
    // Removes one entry of this key and value; false where there is none.
    bool erase(std::uint64_t key, std::uint32_t value);
    // Rewrites one entry's value; false where there is none.
    bool replace(std::uint64_t key, std::uint32_t value, std::uint32_t with);
    // Halves the table while it would stay less than half full.
    void shrink();

    // The first value offered for `key` that `accept(value)` takes, or kNone.
    template <typename Accept>
    std::uint32_t find(std::uint64_t key, Accept&& accept) const {
        const std::uint32_t tag = tag_of(key);
        for (std::size_t i = home(tag);; i = next(i)) {
            const Slot& slot = slots_[i];
            if (slot.value == kNone) return kNone;
            if (slot.tag == tag && accept(slot.value)) return slot.value;
        }
    }

  private:
    struct Slot {
        std::uint32_t tag = 0;
        std::uint32_t value = kNone;
    };

    static constexpr std::size_t kMinSlots = 64;
    // Linear probing: at 13/16 full a miss still reads one or two cache lines.
    static std::size_t limit(std::size_t slots) noexcept { return slots / 16 * 13; }
    // Keys from outside need not be uniform: mix before the bits are used.
    static std::uint32_t tag_of(std::uint64_t key) noexcept {
        return static_cast<std::uint32_t>((key * 0x9E3779B97F4A7C15ull) >> 32);
    }
    std::size_t home(std::uint32_t tag) const noexcept { return tag >> shift_; }
    std::size_t next(std::size_t i) const noexcept { return (i + 1) & (slots_.size() - 1); }
    std::size_t index_of(std::uint64_t key, std::uint32_t value) const noexcept;
    void resize(std::size_t slots);

    std::vector<Slot> slots_;
    std::size_t size_ = 0;
    int shift_ = 0;  // 32 - log2(slots)
};

}  // namespace poolweave
