// All instances of a simulation and the clock over them. Knows no scheduler, no policy and no cost model: what these
// decide it asks for, and what they want to know it tells, both as the result of next(). One thread owns it.
//
// The order of what happens is that of the events' times and, between two events, of a stack of steps: what a told
// caller starts comes before what was still to do.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/simulation/instance.hpp"
#include "core/simulation/timeline.hpp"

namespace poolweave::simulation {

// What the flow keeps, and sizes.
struct Rules {
    bool prefill_keeps = true;
    bool decode_keeps = true;
    bool returns = true;  // answers are sent back to where their prompts were computed
    std::int64_t block_tokens = 16;
    std::int64_t kv_bytes_per_token = 0;
};

enum class News : std::uint8_t {
    kDone,            // nothing is planned, or the horizon has come
    kCall,            // a: the caller's own mark
    kArrived,         // a: request
    kPrefilled,       // a: job, b: tokens that it reused; `gone` was given up where it was kept
    kFinished,        // a: job; `gone` was given up where it was decoded
    kHandOverFailed,  // a: job, whose source died before its KV was sent
    kReturned,        // a: seat; `gone` was given up there
    kReplicated,      // a: replication; its blocks have arrived, and nothing is kept yet
    kPrefillTime,     // how long do a tokens take, b of them reused? The next answer tells
    kStepTime,        // ... a decode step of a sequences over b tokens of context
    kTransferTime,    // ... a transfer of a bytes in b pieces
};

struct Told {
    News news = News::kDone;
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    PayloadList gone = {};
};

struct Replication {
    std::uint32_t number;  // of the request whose prefix it is
    std::uint32_t source, target;  // seats
    std::size_t blocks;
    std::uint32_t target_life = 0;
};

class Fleet {
  public:
    explicit Fleet(const Rules& rules, double horizon_s = std::numeric_limits<double>::infinity());
    Fleet(const Fleet&) = delete;
    Fleet& operator=(const Fleet&) = delete;

    // Before the run.
    std::uint32_t add_request(const Request& request);
    std::uint32_t add_seat(const Seat& seat);  // empty until a life begins
    void arrivals(std::vector<double> times_s) { timeline_.arrivals(std::move(times_s)); }

    // A new life, empty. What the last one had in hand ends with it, silently.
    void begin_life(std::uint32_t seat);
    void end_life(std::uint32_t seat);
    bool alive(std::uint32_t seat) const;

    void call_at(double time_s, std::uint64_t mark) { timeline_.at(time_s, Happening::kCall, 0, mark); }

    // Queue an attempt at a request; its number.
    JobId start(const Job& job);
    void give_up(JobId job) { at(job).over = true; }
    // Send the first blocks of a request's prompt; the number of the replication.
    void replicate(const Replication& wanted);
    const Replication& replication(std::uint64_t number) const { return replications_.at(number); }
    // Add the request's first blocks to the cache of who has this seat. Returns what went for them.
    PayloadList keep(std::uint32_t seat, std::uint32_t number, std::size_t blocks);

    // What happens next, or a question, to which `answer` of the next call is the answer, in seconds.
    Told next(double answer);

    double now() const noexcept { return timeline_.now(); }
    std::size_t planned() const noexcept { return timeline_.size(); }
    std::uint64_t events() const noexcept { return events_; }
    std::int64_t moved_bytes() const noexcept { return moved_bytes_; }
    double busy_s(std::uint32_t seat) const { return busy_s_.at(seat); }  // prefill time of all its lives

  private:
    enum class Do : std::uint8_t { kPrefill, kNextPrefill, kFetch, kBeginPrefill, kAfterPrefill, kHandOver, kDecode, kDecoded, kPlanEnd, kFinish, kTell, kReplicate };
    struct Step {
        Do what;
        std::uint32_t a;  // a life, a job or a replication
        JobId job = kNoJob;
    };

    Job& at(JobId job) { return jobs_.at(job); }
    const Request& request(JobId job) const { return requests_[jobs_[job].number]; }
    Instance& life(std::uint32_t id) { return *lives_[id]; }
    std::uint32_t life_of(std::uint32_t seat) const;
    Instance& on(std::uint32_t seat) { return *lives_[life_of(seat)]; }
    bool parted(const Job& job) const noexcept { return job.decode != job.prefill; }

    void take_fresh();
    bool happen(const Planned& event);        // whether something is told
    bool handed_over(JobId id);
    bool perform(const Step& step);           // likewise
    bool perform_for(JobId id, Do what);
    void answered(double seconds);
    bool ask(const Step& step, News news, std::int64_t a, std::int64_t b);
    bool ask_transfer(const Step& step, std::int64_t tokens);
    double sent(std::uint32_t source, double seconds);

    void next_prefill(std::uint32_t id);
    bool fetch(JobId id);
    bool begin_prefill(JobId id);
    void after_prefill(JobId id);
    void decoded(std::uint32_t id);
    bool plan_end(std::uint32_t id);
    void plan_known_end(std::uint32_t id);
    bool finish(JobId id);

    Rules rules_;
    double horizon_s_;
    Timeline timeline_;
    std::vector<Request> requests_;
    std::vector<Seat> seats_;
    std::vector<std::uint32_t> lives_on_;     // life by seat
    std::vector<double> busy_s_;              // by seat
    std::vector<std::unique_ptr<Instance>> lives_;
    std::vector<Job> jobs_;
    std::vector<Replication> replications_;
    std::vector<Step> steps_;                 // a stack
    std::vector<Step> fresh_;                 // asked for since next(), in order
    Step asked_{};
    bool asking_ = false;
    Told told_;
    Told finished_;                           // to be told after a question
    std::uint64_t events_ = 0;
    std::int64_t moved_bytes_ = 0;
};

}  // namespace poolweave::simulation
