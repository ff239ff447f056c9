// One life of a simulated instance: a prefill queue, a decode batch and a cache. Takes time instead of computing.
//
// Prefills run one after the other, first come first served. All sequences of the decode batch advance together, one
// token a step; the step's time follows the batch. A colocated instance stops decoding while it prefills.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "core/radix_tree.hpp"

namespace poolweave::simulation {

// One request of a trace. `keys` (uint64, a block each) are of prompt and answer; `tokens` two a key; both are the caller's.
struct Request {
    std::span<const std::uint64_t> keys;
    std::span<const std::int32_t> tokens;
    std::size_t prompt_blocks = 0;
    std::int64_t num_tokens = 0;
    std::int64_t output_tokens = 0;

    std::int64_t whole() const noexcept { return num_tokens + output_tokens; }
    std::int64_t context() const noexcept { return num_tokens + output_tokens / 2; }  // attended over, on average
};

// A place for an instance, which may live several times.
struct Seat {
    bool pauses = false;         // its decode, while it prefills
    std::size_t cache_blocks = 0;
    std::int64_t kv_tokens = 0;  // room for the KV of running requests
    double slowness = 1.0;
};

// Historical KV under a cap: the index of a real instance, with the halves of block keys for tokens.
class BlockCache {
  public:
    explicit BlockCache(std::size_t capacity_blocks);

    // How many of the request's first blocks are held.
    std::size_t match(const Request& request, std::size_t num_blocks);
    // Keeps the request's first blocks, as far as there is room. Returns the keys given up for them.
    PayloadList insert(const Request& request, std::size_t num_blocks);

  private:
    std::size_t capacity_;
    std::size_t used_ = 0;
    RadixTree tree_;
};

using JobId = std::uint32_t;
constexpr JobId kNoJob = ~JobId{0};

// One attempt at a request.
struct Job {
    std::uint32_t number = 0;           // of its request
    std::uint32_t prefill = 0;          // seats
    std::uint32_t decode = 0;           // that of `prefill` when it decodes there too
    std::int32_t fetch_from = -1;       // a seat, or none
    std::size_t fetch_blocks = 0;       // wanted, then held there
    double fetch_s = 0.0;
    std::int64_t cached_tokens = 0;
    std::uint32_t source = 0, target = 0;  // lives, while KV is on its way
    bool over = false;                  // ended or given up: its later events mean nothing
};

// A decode batch: `progress` tokens have been given to each sequence that was there all the time.
class Batch {
  public:
    Batch(std::int64_t kv_room, bool pauses) : kv_room_(kv_room), pauses_(pauses) {}

    void wait(JobId job) { waiting_.push_back(job); }
    // Brings `progress` up to now.
    void advance(double now, bool prefilling) noexcept;
    // Takes in those that wait, as far as there is room.
    void admit(const std::vector<Job>& jobs, const std::vector<Request>& requests);
    // The planned end has come: what is due then is due exactly, free of rounding.
    void arrive() noexcept;
    // A sequence that is at its end, taken out; none: kNoJob.
    JobId pop(const std::vector<Job>& jobs, const std::vector<Request>& requests);

    bool runs(bool prefilling) const noexcept { return !running_.empty() && !(pauses_ && prefilling); }
    std::size_t size() const noexcept { return running_.size(); }
    std::int64_t context_tokens() const noexcept { return context_tokens_; }
    // Seconds until the first sequence ends.
    double left_s() const noexcept;

    double step_s = 0.0;         // of the batch as it is; 0.0: not known
    std::uint64_t version = 0;   // of the planned end

  private:
    struct Running {
        double end;  // the progress at which it ends
        std::uint32_t number;
        JobId job;
        bool operator<(const Running& other) const noexcept {  // for a heap: the last to end is the least
            if (end != other.end) return end > other.end;
            return number != other.number ? number > other.number : job > other.job;
        }
    };

    std::int64_t kv_room_;
    bool pauses_;
    double progress_ = 0.0;
    double since_ = 0.0;
    std::int64_t kv_tokens_ = 0;       // reserved, to the end of each answer
    std::int64_t context_tokens_ = 0;
    std::vector<Running> running_;     // a heap
    std::deque<JobId> waiting_;
};

struct Instance {
    Instance(std::uint32_t seat_number, const Seat& place)
        : seat(seat_number), slowness(place.slowness), cache(place.cache_blocks), batch(place.kv_tokens, place.pauses) {}

    bool prefilling() const noexcept { return prefill != kNoJob; }

    std::uint32_t seat;
    double slowness;
    bool alive = true;
    BlockCache cache;
    Batch batch;
    std::deque<JobId> queue;
    JobId prefill = kNoJob;            // the prompt that is computed
    double link_free_s = 0.0;          // transfers from here go one after the other
};

}  // namespace poolweave::simulation
