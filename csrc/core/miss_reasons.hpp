// Why a lookup stopped: a bounded memory of blocks that are not in the tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poolweave {

enum class MissReason : std::uint8_t {
    kNone = 0,        // nothing missing: every whole block matched
    kNeverStored,     // nobody inserted it, or so long ago that it is forgotten
    kEvicted,         // dropped to make room
    kExpired,         // not used for the time to live
    kDeleted,         // deleted or cleared by the owner
    kOtherIdentity,   // its first block is stored, under another namespace only
    kInstanceGone,    // its holder died or left
    kInFlight,        // announced, not arrived yet
    kTimeout,         // asked for, did not come in time
};
inline constexpr std::size_t kMissReasons = 9;

// A direct-mapped table of fingerprints: newer marks replace older ones, memory never grows. A wrong answer needs
// 28 equal bits in one slot and costs a wrong word in a report, never a wrong hit.
class MissMemory {
  public:
    explicit MissMemory(std::size_t slots) : slots_(slots) {}  // a power of two

    void mark(std::uint64_t hash, MissReason reason) noexcept {
        slots_[hash & (slots_.size() - 1)] = fingerprint(hash) | static_cast<std::uint32_t>(reason);
    }

    MissReason find(std::uint64_t hash) const noexcept {
        const std::uint32_t slot = slots_[hash & (slots_.size() - 1)];
        if (slot == 0 || (slot & ~kReasonBits) != fingerprint(hash)) return MissReason::kNeverStored;
        return static_cast<MissReason>(slot & kReasonBits);
    }

    std::size_t nbytes() const noexcept { return slots_.size() * sizeof(std::uint32_t); }

  private:
    static constexpr std::uint32_t kReasonBits = 15;
    static std::uint32_t fingerprint(std::uint64_t hash) noexcept {
        return static_cast<std::uint32_t>(hash >> 32) & ~kReasonBits;
    }

    std::vector<std::uint32_t> slots_;
};

}  // namespace poolweave
