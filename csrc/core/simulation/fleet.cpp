#include "core/simulation/fleet.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace poolweave::simulation {

namespace {

constexpr std::uint32_t kNobody = ~std::uint32_t{0};

}  // namespace

Fleet::Fleet(const Rules& rules, double horizon_s) : rules_(rules), horizon_s_(horizon_s) {
    if (rules.block_tokens < 1) throw Error(Code::kConfig, "block_tokens must be positive, got " + std::to_string(rules.block_tokens));
}

std::uint32_t Fleet::add_request(const Request& request) {
    if (request.tokens.size() != 2 * request.keys.size() || request.prompt_blocks > request.keys.size()) {
        throw Error(Code::kConfig, "a request of " + std::to_string(request.keys.size()) + " block keys needs two tokens a key and at most as many blocks of prompt");
    }
    requests_.push_back(request);
    return static_cast<std::uint32_t>(requests_.size() - 1);
}

std::uint32_t Fleet::add_seat(const Seat& seat) {
    seats_.push_back(seat);
    lives_on_.push_back(kNobody);
    busy_s_.push_back(0.0);
    return static_cast<std::uint32_t>(seats_.size() - 1);
}

void Fleet::begin_life(std::uint32_t seat) {
    lives_.push_back(std::make_unique<Instance>(seat, seats_.at(seat)));
    lives_on_[seat] = static_cast<std::uint32_t>(lives_.size() - 1);
}

void Fleet::end_life(std::uint32_t seat) { on(seat).alive = false; }

bool Fleet::alive(std::uint32_t seat) const { return lives_on_.at(seat) != kNobody && lives_[lives_on_[seat]]->alive; }

std::uint32_t Fleet::life_of(std::uint32_t seat) const {
    const std::uint32_t life = lives_on_.at(seat);
    if (life == kNobody) throw Error(Code::kConfig, "nobody has seat " + std::to_string(seat) + " yet");
    return life;
}

JobId Fleet::start(const Job& job) {
    (void)life_of(job.prefill);
    (void)life_of(job.decode);
    (void)requests_.at(job.number);
    const auto id = static_cast<JobId>(jobs_.size());
    jobs_.push_back(job);
    fresh_.push_back({Do::kPrefill, life_of(job.prefill), id});
    return id;
}

void Fleet::replicate(const Replication& wanted) {
    (void)requests_.at(wanted.number);
    Replication replication = wanted;
    replication.target_life = life_of(wanted.target);
    if (!on(wanted.source).alive) return;
    replications_.push_back(replication);
    fresh_.push_back({Do::kReplicate, static_cast<std::uint32_t>(replications_.size() - 1)});
}

PayloadList Fleet::keep(std::uint32_t seat, std::uint32_t number, std::size_t blocks) {
    return on(seat).cache.insert(requests_.at(number), blocks);
}

Told Fleet::next(double answer) {
    told_ = Told{};
    if (asking_) {
        asking_ = false;
        answered(answer);
    }
    take_fresh();
    for (;;) {
        while (!steps_.empty()) {
            const Step step = steps_.back();
            steps_.pop_back();
            if (perform(step)) return std::move(told_);
        }
        if (timeline_.size() == 0 || now() >= horizon_s_) return Told{};
        ++events_;
        if (happen(timeline_.pop())) return std::move(told_);
    }
}

void Fleet::take_fresh() {
    steps_.insert(steps_.end(), fresh_.rbegin(), fresh_.rend());
    fresh_.clear();
}

bool Fleet::happen(const Planned& event) {
    switch (event.what) {
        case Happening::kCall: told_ = {News::kCall, event.b}; return true;
        case Happening::kArrival: told_ = {News::kArrived, event.a}; return true;
        case Happening::kPrefilled: {
            Instance& instance = life(event.a);
            const auto id = static_cast<JobId>(event.b);
            if (!instance.alive) return false;
            steps_.push_back({Do::kNextPrefill, event.a});
            if (at(id).over) return false;
            steps_.push_back({Do::kAfterPrefill, event.a, id});
            told_ = {News::kPrefilled, id, static_cast<std::uint64_t>(at(id).cached_tokens)};
            if (rules_.prefill_keeps) told_.gone = instance.cache.insert(request(id), request(id).prompt_blocks);
            return true;
        }
        case Happening::kHandedOver: return handed_over(static_cast<JobId>(event.b));
        case Happening::kDecoded: {
            Instance& instance = life(event.a);
            if (!instance.alive || instance.batch.version != event.b) return false;
            instance.batch.advance(now(), instance.prefilling());
            instance.batch.arrive();
            steps_.push_back({Do::kDecoded, event.a});
            return false;
        }
        case Happening::kReturned: {
            const Request& request = requests_[event.b];
            if (!life(event.a).alive) return false;
            told_ = {News::kReturned, life(event.a).seat, 0, life(event.a).cache.insert(request, request.keys.size())};
            return !told_.gone.empty();
        }
        case Happening::kReplicated:
            told_ = {News::kReplicated, event.b};
            return life(replications_[event.b].target_life).alive;
    }
    return false;
}

bool Fleet::handed_over(JobId id) {
    const Job& job = at(id);
    if (job.over || !life(job.target).alive) return false;  // the membership will find out
    if (life(job.source).alive) {
        steps_.push_back({Do::kDecode, job.target, id});
        return false;
    }
    told_ = {News::kHandOverFailed, id};  // the pull failed: its lease tells before the membership does
    return true;
}

// --- steps --------------------------------------------------------------------------------------------------------

bool Fleet::perform(const Step& step) {
    switch (step.what) {
        case Do::kPrefill:
            life(step.a).queue.push_back(step.job);
            if (!life(step.a).prefilling()) next_prefill(step.a);
            return false;
        case Do::kNextPrefill: next_prefill(step.a); return false;
        case Do::kFetch: return fetch(step.job);
        case Do::kBeginPrefill: return begin_prefill(step.job);
        case Do::kAfterPrefill: after_prefill(step.job); return false;
        case Do::kHandOver: {
            const Job& job = at(step.job);
            std::int64_t tokens = request(step.job).num_tokens;
            if (rules_.decode_keeps) {
                tokens -= static_cast<std::int64_t>(life(job.target).cache.match(request(step.job), request(step.job).prompt_blocks)) * rules_.block_tokens;
            }
            return ask_transfer(step, tokens);
        }
        case Do::kDecode: {
            Instance& instance = life(step.a);
            instance.batch.wait(step.job);
            instance.batch.advance(now(), instance.prefilling());
            instance.batch.admit(jobs_, requests_);
            return plan_end(step.a);
        }
        case Do::kDecoded: decoded(step.a); return false;
        case Do::kPlanEnd: return plan_end(step.a);
        case Do::kFinish: return finish(step.job);
        case Do::kTell: told_ = std::move(finished_); return true;
        case Do::kReplicate: return ask_transfer(step, static_cast<std::int64_t>(replications_[step.a].blocks) * rules_.block_tokens);
    }
    return false;
}

bool Fleet::ask(const Step& step, News news, std::int64_t a, std::int64_t b) {
    asked_ = step;
    asking_ = true;
    told_.news = news;
    told_.a = static_cast<std::uint64_t>(a);
    told_.b = static_cast<std::uint64_t>(b);
    return true;
}

bool Fleet::ask_transfer(const Step& step, std::int64_t tokens) {
    const std::int64_t nbytes = std::max<std::int64_t>(tokens, 0) * rules_.kv_bytes_per_token;
    moved_bytes_ += nbytes;
    return ask(step, News::kTransferTime, nbytes, (std::max<std::int64_t>(tokens, 0) + rules_.block_tokens - 1) / rules_.block_tokens);
}

// When a transfer of this time from here is over.
double Fleet::sent(std::uint32_t source, double seconds) {
    Instance& instance = life(source);
    instance.link_free_s = std::max(now(), instance.link_free_s) + seconds;
    return instance.link_free_s;
}

void Fleet::answered(double seconds) {
    const Step step = asked_;
    switch (step.what) {
        case Do::kFetch: {
            Job& job = at(step.job);
            job.fetch_s = sent(life_of(static_cast<std::uint32_t>(job.fetch_from)), seconds) - now();
            steps_.push_back({Do::kBeginPrefill, step.a, step.job});
            return;
        }
        case Do::kBeginPrefill: {
            const double slow_s = seconds * life(step.a).slowness;
            busy_s_[life(step.a).seat] += slow_s;
            timeline_.after(at(step.job).fetch_s + slow_s, Happening::kPrefilled, step.a, step.job);
            return;
        }
        case Do::kHandOver: timeline_.at(sent(at(step.job).source, seconds), Happening::kHandedOver, 0, step.job); return;
        case Do::kFinish: {
            const Job& job = at(step.job);
            timeline_.at(sent(life_of(job.decode), seconds), Happening::kReturned, life_of(job.prefill), job.number);
            return;
        }
        case Do::kReplicate: timeline_.at(sent(life_of(replications_[step.a].source), seconds), Happening::kReplicated, 0, step.a); return;
        default:  // kPlanEnd
            life(step.a).batch.step_s = seconds * life(step.a).slowness;
            plan_known_end(step.a);
    }
}

void Fleet::next_prefill(std::uint32_t id) {
    Instance& instance = life(id);
    while (!instance.queue.empty() && at(instance.queue.front()).over) instance.queue.pop_front();
    instance.batch.advance(now(), instance.prefilling());
    instance.prefill = kNoJob;
    if (!instance.queue.empty()) {
        instance.prefill = instance.queue.front();
        instance.queue.pop_front();
        steps_.push_back({Do::kFetch, id, instance.prefill});
    }
    steps_.push_back({Do::kPlanEnd, id});
}

// What another instance holds and this one lacks is pulled before the prompt is computed.
bool Fleet::fetch(JobId id) {
    Job& job = at(id);
    const std::uint32_t here = lives_on_[job.prefill];
    const Step begin{Do::kBeginPrefill, here, id};
    const std::size_t wanted = std::exchange(job.fetch_blocks, 0);
    if (job.fetch_from < 0 || !alive(static_cast<std::uint32_t>(job.fetch_from))) return perform(begin);
    const std::size_t held = on(static_cast<std::uint32_t>(job.fetch_from)).cache.match(request(id), wanted);
    const std::size_t here_held = life(here).cache.match(request(id), held);
    if (held <= here_held) return perform(begin);
    job.fetch_blocks = held;
    return ask_transfer({Do::kFetch, here, id}, static_cast<std::int64_t>(held - here_held) * rules_.block_tokens);
}

bool Fleet::begin_prefill(JobId id) {
    Job& job = at(id);
    const std::uint32_t here = lives_on_[job.prefill];
    const std::int64_t tokens = request(id).num_tokens;
    const std::size_t held = life(here).cache.match(request(id), static_cast<std::size_t>((tokens - 1) / rules_.block_tokens));
    job.cached_tokens = static_cast<std::int64_t>(std::max(held, job.fetch_blocks)) * rules_.block_tokens;
    return ask({Do::kBeginPrefill, here, id}, News::kPrefillTime, tokens, job.cached_tokens);
}

void Fleet::after_prefill(JobId id) {
    Job& job = at(id);
    job.source = life_of(job.prefill);
    job.target = life_of(job.decode);
    const Do next = request(id).output_tokens == 1 ? Do::kFinish : parted(job) ? Do::kHandOver : Do::kDecode;
    steps_.push_back({next, job.target, id});
}

void Fleet::decoded(std::uint32_t id) {
    Batch& batch = life(id).batch;
    for (JobId job; (job = batch.pop(jobs_, requests_)) != kNoJob;) {
        if (at(job).over) continue;
        steps_.push_back({Do::kDecoded, id});
        steps_.push_back({Do::kFinish, id, job});
        return;
    }
    batch.admit(jobs_, requests_);
    steps_.push_back({Do::kPlanEnd, id});
}

bool Fleet::plan_end(std::uint32_t id) {
    Instance& instance = life(id);
    Batch& batch = instance.batch;
    if (batch.runs(instance.prefilling()) && batch.step_s == 0.0) {
        return ask({Do::kPlanEnd, id}, News::kStepTime, static_cast<std::int64_t>(batch.size()), batch.context_tokens());
    }
    plan_known_end(id);
    return false;
}

void Fleet::plan_known_end(std::uint32_t id) {
    Instance& instance = life(id);
    ++instance.batch.version;
    if (instance.batch.runs(instance.prefilling())) timeline_.after(instance.batch.left_s(), Happening::kDecoded, id, instance.batch.version);
}

bool Fleet::finish(JobId id) {
    Job& job = at(id);
    job.over = true;
    const Request& asked = request(id);
    told_ = {News::kFinished, id};
    const bool keeps = parted(job) ? rules_.decode_keeps : rules_.prefill_keeps && asked.keys.size() > asked.prompt_blocks;
    if (keeps) told_.gone = on(job.decode).cache.insert(asked, asked.keys.size());
    if (!parted(job) || !rules_.returns || !alive(job.prefill)) return true;
    finished_ = std::move(told_);  // told once the answer's way back is planned
    told_ = Told{};
    steps_.push_back({Do::kTell, 0, id});
    return ask_transfer({Do::kFinish, 0, id}, asked.output_tokens);
}

}  // namespace poolweave::simulation
