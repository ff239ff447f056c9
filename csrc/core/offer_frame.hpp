// A small offer that nobody but the index will hear of, read out of its message without trusting it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace poolweave {

// Whole, under no tag, to be indexed, into no reservation: what an Intake takes in by itself.
struct OfferFrame {
    std::uint64_t number = 0;
    std::size_t num_blocks = 0;
    unsigned mask = 0;
    std::string_view identity;  // 16 bytes of the message
    std::string_view tenant;    // 16 of it, or none
    std::vector<std::int32_t> tokens;
    std::vector<std::uint8_t> tiers;
    std::vector<std::int32_t> slots;
    std::vector<std::uint64_t> checksums;  // one a block, or none
};

// Nothing for any other message, well-formed or not: transfer/messages.py, which says what messages there are, is asked then.
// Allocates no more than `message` is long.
std::optional<OfferFrame> read_offer(std::string_view message, std::size_t most_blocks);

}  // namespace poolweave
