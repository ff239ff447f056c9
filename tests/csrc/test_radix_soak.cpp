// A million random steps on the radix tree, every answer compared with a dictionary of prefixes.
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.hpp"
#include "core/radix_tree.hpp"

using namespace poolweave;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSteps = 100'000;
#else
constexpr int kSteps = 1'000'000;
#endif
constexpr std::size_t kBlock = 2;
constexpr std::size_t kEnough = 4'000;  // blocks: above it, steps evict

// What is stored, by namespace and whole-block prefix.
struct Oracle {
    struct Entry {
        std::uint64_t payload = 0;
        int children = 0;
        int pins = 0;
    };
    std::unordered_map<std::string, Entry> stored;
    std::unordered_map<std::uint64_t, std::string> by_payload;

    static std::string key(const std::vector<std::int32_t>& tokens, std::size_t blocks, std::uint32_t ns) {
        std::string bytes(1, static_cast<char>('a' + ns));
        for (std::size_t i = 0; i < blocks * kBlock; ++i) bytes += static_cast<char>(tokens[i]);
        return bytes;
    }
    static std::string parent(const std::string& key) { return key.substr(0, key.size() - kBlock); }

    std::vector<std::uint64_t> match(const std::vector<std::int32_t>& tokens, std::uint32_t ns) const {
        std::vector<std::uint64_t> found;
        while (found.size() < tokens.size() / kBlock) {
            const auto entry = stored.find(key(tokens, found.size() + 1, ns));
            if (entry == stored.end()) break;
            found.push_back(entry->second.payload);
        }
        return found;
    }
    void add(const std::string& name, std::uint64_t payload) {
        stored[name].payload = payload;
        by_payload[payload] = name;
        if (name.size() > 1 + kBlock) ++stored[parent(name)].children;
    }
    // The index gave this payload up: it must have been an unpinned end of a prefix.
    void give_up(std::uint64_t payload) {
        const auto named = by_payload.find(payload);
        CHECK(named != by_payload.end());
        const std::string name = named->second;
        CHECK(stored[name].children == 0 && stored[name].pins == 0);
        stored.erase(name);
        by_payload.erase(named);
        if (name.size() > 1 + kBlock) --stored[parent(name)].children;
    }
};

class Soak {
  public:
    void run() {
        for (int step = 0; step < kSteps; ++step) {
            draw();
            switch (random_() % 16) {
                case 0: case 1: case 2: case 3: case 4: insert(); break;
                case 5: pin(); break;
                case 6: unpin(); break;
                case 7: give_up(tree_.remove(tokens_, ns_)); break;
                case 8: give_up(tree_.evict(random_() % 20)); break;
                case 9: if (random_() % 4096 == 0) give_up(tree_.clear(ns_)); break;
                default: match();
            }
            CHECK(tree_.num_blocks() == oracle_.stored.size());
            if (oracle_.stored.size() > kEnough) give_up(tree_.evict(500));
            if (step % 20'000 == 0) CHECK(tree_.check().empty());
        }
        while (!pinned_.empty()) unpin();
        CHECK(tree_.check().empty());
        give_up(tree_.evict(1'000'000));
        CHECK(oracle_.stored.empty() && tree_.stats().num_nodes == 0);
    }

  private:
    // Mostly prefixes that share much, now and then a long one.
    void draw() {
        const std::size_t length = random_() % 32 == 0 ? random_() % 400 : random_() % 40;
        tokens_.resize(length);
        for (std::int32_t& token : tokens_) token = random_() % 8 == 0 ? 1 : 0;
        ns_ = random_() % 3;
    }
    void insert() {
        std::vector<std::uint64_t> payloads(tokens_.size() / kBlock);
        for (std::uint64_t& payload : payloads) payload = next_++;
        const std::size_t present = oracle_.match(tokens_, ns_).size();
        const Inserted result = tree_.insert(tokens_, payloads, ns_, {0, static_cast<std::uint8_t>(random_() % 3)});
        CHECK(result.duplicates.size() == present && result.num_new == payloads.size() - present);
        for (std::size_t i = present; i < payloads.size(); ++i) oracle_.add(Oracle::key(tokens_, i + 1, ns_), payloads[i]);
    }
    void match() {
        const Match found = tree_.match(tokens_, ns_, {.touch = random_() % 4 != 0});
        CHECK(found.blocks == oracle_.match(tokens_, ns_));
        CHECK((found.miss_reason == MissReason::kNone) == (found.num_tokens / kBlock == tokens_.size() / kBlock));
    }
    void pin() {
        if (pinned_.size() >= 20) return;
        const Match found = tree_.match(tokens_, ns_, {.pin = true});
        CHECK(found.blocks == oracle_.match(tokens_, ns_));
        if (found.pinned == kNoNode) return;
        pinned_.push_back({found.pinned, found.blocks});
        for (const std::uint64_t payload : found.blocks) ++oracle_.stored[oracle_.by_payload[payload]].pins;
    }
    void unpin() {
        if (pinned_.empty()) return;
        std::swap(pinned_[random_() % pinned_.size()], pinned_.back());
        tree_.unpin(pinned_.back().first);
        for (const std::uint64_t payload : pinned_.back().second) --oracle_.stored[oracle_.by_payload[payload]].pins;
        pinned_.pop_back();
    }
    void give_up(const PayloadList& payloads) {
        for (const std::uint64_t payload : payloads) oracle_.give_up(payload);
    }

    RadixTree tree_{{.block_tokens = kBlock}};
    Oracle oracle_;
    std::mt19937 random_{20240617};
    std::vector<std::int32_t> tokens_;
    std::uint32_t ns_ = 0;
    std::uint64_t next_ = 1;
    std::vector<std::pair<NodeId, PayloadList>> pinned_;
};

}  // namespace

int main() {
    Soak().run();
    return 0;
}
