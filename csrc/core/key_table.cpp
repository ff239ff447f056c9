#include "core/key_table.hpp"

#include <bit>

#include "core/error.hpp"

namespace poolweave {

namespace {
constexpr std::size_t kMaxSlots = std::size_t{1} << 31;  // a home position comes from a 32-bit tag
constexpr std::size_t kAbsent = ~std::size_t{0};
}  // namespace

KeyTable::KeyTable() { resize(kMinSlots); }

std::size_t KeyTable::nbytes_with(std::size_t extra) const noexcept {
    std::size_t slots = slots_.size();
    while (limit(slots) < size_ + extra) slots *= 2;
    return slots * sizeof(Slot);
}

void KeyTable::reserve(std::size_t extra) {
    const std::size_t slots = nbytes_with(extra) / sizeof(Slot);
    if (slots > kMaxSlots) throw Error(Code::kConfig, "a prompt tree holds at most 1.7e9 blocks; set max_bytes");
    if (slots > slots_.size()) resize(slots);
}

void KeyTable::insert(std::uint64_t key, std::uint32_t value) {
    reserve(1);
    const std::uint32_t tag = tag_of(key);
    std::size_t i = home(tag);
    while (slots_[i].value != kNone) i = next(i);
    slots_[i] = Slot{tag, value};
    ++size_;
}

bool KeyTable::erase(std::uint64_t key, std::uint32_t value) {
    std::size_t hole = index_of(key, value);
    if (hole == kAbsent) return false;
    // Move later entries of the cluster back, so that no probe meets a gap before its entry.
    for (std::size_t i = next(hole); slots_[i].value != kNone; i = next(i)) {
        const std::size_t from_home = (i - home(slots_[i].tag)) & (slots_.size() - 1);
        const std::size_t from_hole = (i - hole) & (slots_.size() - 1);
        if (from_home >= from_hole) {
            slots_[hole] = slots_[i];
            hole = i;
        }
    }
    slots_[hole] = Slot{};
    --size_;
    return true;
}

bool KeyTable::replace(std::uint64_t key, std::uint32_t value, std::uint32_t with) {
    const std::size_t i = index_of(key, value);
    if (i == kAbsent) return false;
    slots_[i].value = with;
    return true;
}

void KeyTable::shrink() {
    std::size_t slots = slots_.size();
    while (slots > kMinSlots && size_ < slots / 4) slots /= 2;
    if (slots < slots_.size()) resize(slots);
}

std::size_t KeyTable::index_of(std::uint64_t key, std::uint32_t value) const noexcept {
    const std::uint32_t tag = tag_of(key);
    for (std::size_t i = home(tag);; i = next(i)) {
        if (slots_[i].value == kNone) return kAbsent;
        if (slots_[i].tag == tag && slots_[i].value == value) return i;
    }
}

void KeyTable::resize(std::size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    shift_ = 32 - std::countr_zero(slots);
    for (const Slot& slot : old) {
        if (slot.value == kNone) continue;
        std::size_t i = home(slot.tag);
        while (slots_[i].value != kNone) i = next(i);
        slots_[i] = slot;
    }
}

}  // namespace poolweave
