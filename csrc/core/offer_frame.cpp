#include "core/offer_frame.hpp"

#include <bit>
#include <cstring>

#include "core/error.hpp"
#include "core/msgpack_reader.hpp"

namespace poolweave {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are little-endian as they lie in memory");

using Kind = MsgpackReader::Kind;

constexpr std::size_t kFields = 18;  // the name of the message, and those of Offer
constexpr std::size_t kDigestBytes = 16;
constexpr std::uint64_t kMostTokens = 1u << 31;
constexpr double kMostLease_s = 1e6;

// The fields in turn. One that is not as it has to be makes all of them nothing.
class Fields {
  public:
    explicit Fields(std::string_view message) : reader_(message) {}

    bool good() const noexcept { return good_; }
    bool ends() const noexcept { return good_ && reader_.done(); }
    void require(bool condition) noexcept { good_ = good_ && condition; }

    MsgpackReader::Head next(Kind kind) {
        if (!good_) return {};
        const MsgpackReader::Head head = reader_.next();
        require(head.kind == kind && !head.negative);
        return good_ ? head : MsgpackReader::Head{};
    }
    std::uint64_t integer() { return next(Kind::kInt).integer; }
    bool flag() { return next(Kind::kBool).integer != 0; }
    std::string_view bytes() { return next(Kind::kBytes).text; }

    // Copied: in a message nothing is aligned.
    template <class T>
    std::vector<T> array() {
        const std::string_view raw = bytes();
        require(raw.size() % sizeof(T) == 0);
        std::vector<T> out(raw.size() / sizeof(T));
        if (!out.empty()) std::memcpy(out.data(), raw.data(), out.size() * sizeof(T));
        return out;
    }

  private:
    MsgpackReader reader_;
    bool good_ = true;
};

std::optional<OfferFrame> read(std::string_view message, std::size_t most_blocks) {
    Fields fields(message);
    fields.require(fields.next(Kind::kArray).size == kFields);
    fields.require(fields.next(Kind::kText).text == "offer");
    OfferFrame offer;
    offer.number = fields.integer();
    fields.integer();  // the nonce
    const double lease_s = fields.next(Kind::kFloat).real;
    fields.require(offer.number > 0 && offer.number < 1ull << 63 && lease_s > 0 && lease_s < kMostLease_s);
    fields.require(fields.bytes().empty());  // the tag
    const std::uint64_t count = fields.integer(), num_tokens = fields.integer();
    fields.require(count > 0 && count <= most_blocks && num_tokens < kMostTokens);
    offer.num_blocks = static_cast<std::size_t>(count);
    offer.tiers = fields.array<std::uint8_t>();
    offer.slots = fields.array<std::int32_t>();
    offer.checksums = fields.array<std::uint64_t>();
    fields.require(offer.tiers.size() == count && offer.slots.size() == count);
    fields.require(offer.checksums.empty() || offer.checksums.size() == count);
    offer.identity = fields.bytes();
    fields.require(offer.identity.size() == kDigestBytes);
    offer.tenant = fields.bytes();
    fields.require(offer.tenant.empty() || offer.tenant.size() == kDigestBytes);
    offer.tokens = fields.array<std::int32_t>();
    fields.require(offer.tokens.size() == num_tokens);
    const bool insert = fields.flag(), is_private = fields.flag();
    const std::uint64_t mask = fields.integer(), reservation = fields.integer();
    const bool growing = fields.flag();
    fields.require(insert && !is_private && mask >= 1 && mask <= 3 && reservation == 0 && !growing);
    offer.mask = static_cast<unsigned>(mask);
    if (!fields.ends()) return std::nullopt;
    return offer;
}

}  // namespace

std::optional<OfferFrame> read_offer(std::string_view message, std::size_t most_blocks) {
    try {
        return read(message, most_blocks);
    } catch (const Error&) {
        return std::nullopt;
    }
}

}  // namespace poolweave
