#include "core/simulation/instance.hpp"

#include <algorithm>

namespace poolweave::simulation {

namespace {

RadixConfig cache_config() {
    RadixConfig config;
    config.block_tokens = 2;  // a block key's halves
    config.explains_misses = false;
    return config;
}

}  // namespace

BlockCache::BlockCache(std::size_t capacity_blocks) : capacity_(capacity_blocks), tree_(cache_config()) {}

std::size_t BlockCache::match(const Request& request, std::size_t num_blocks) {
    return tree_.match(request.tokens.first(std::min(2 * num_blocks, request.tokens.size())), 0).num_tokens / 2;
}

PayloadList BlockCache::insert(const Request& request, std::size_t num_blocks) {
    const std::size_t count = std::min({num_blocks, capacity_, request.keys.size()});
    if (count == 0) return {};
    used_ += tree_.insert(request.tokens.first(2 * count), request.keys.first(count), 0).num_new;
    if (used_ <= capacity_) return {};
    PayloadList gone = tree_.evict(used_ - capacity_);
    used_ -= gone.size();
    return gone;
}

void Batch::advance(double now, bool prefilling) noexcept {
    if (since_ < now && runs(prefilling)) progress_ += (now - since_) / step_s;
    since_ = now;
}

void Batch::admit(const std::vector<Job>& jobs, const std::vector<Request>& requests) {
    while (!waiting_.empty()) {
        const JobId id = waiting_.front();
        const Job& job = jobs[id];
        const Request& request = requests[job.number];
        if (!job.over && !running_.empty() && kv_tokens_ + request.whole() > kv_room_) return;
        waiting_.pop_front();
        if (job.over) continue;
        step_s = 0.0;
        kv_tokens_ += request.whole();
        context_tokens_ += request.context();
        // The first token came with the prefill.
        running_.push_back({progress_ + static_cast<double>(request.output_tokens) - 1.0, job.number, id});
        std::push_heap(running_.begin(), running_.end());
    }
}

void Batch::arrive() noexcept { progress_ = std::max(progress_, running_.front().end); }

JobId Batch::pop(const std::vector<Job>& jobs, const std::vector<Request>& requests) {
    if (running_.empty() || running_.front().end > progress_) return kNoJob;
    std::pop_heap(running_.begin(), running_.end());
    const JobId id = running_.back().job;
    running_.pop_back();
    const Request& request = requests[jobs[id].number];
    kv_tokens_ -= request.whole();
    context_tokens_ -= request.context();
    step_s = 0.0;
    return id;
}

double Batch::left_s() const noexcept { return std::max(running_.front().end - progress_, 0.0) * step_s; }

}  // namespace poolweave::simulation
