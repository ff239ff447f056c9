#include "cuda/device.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "core/checksum.hpp"
#include "core/error.hpp"

namespace poolweave::cuda {
namespace {

constexpr std::uint64_t kBounceBytes = 4u << 20;  // hashed in pieces of this

Address address_of(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }
std::byte* pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address)); }

// Calls each(address, nbytes, offset) for every run of bytes [begin, end) of all blocks laid one after the other, `offset`
// being how far behind `begin` the run begins. What lies before is skipped block by block.
template <typename Each>
void each_run(const Extents& extents, std::uint64_t begin, std::uint64_t end, Each each) {
    if (begin > end || end > extents.nbytes()) {
        throw Error(Code::kConfig, "bytes " + std::to_string(begin) + " to " + std::to_string(end) + " are not among " +
                                       std::to_string(extents.nbytes()));
    }
    if (begin == end) return;
    const std::uint64_t first = begin / extents.block_bytes();
    std::uint64_t at = first * extents.block_bytes();
    for (std::size_t block = first; at < end; ++block) {
        for (const Run& run : extents.runs_of(block)) {
            const std::uint64_t low = std::max(begin, at), high = std::min(end, at + run.nbytes);
            if (low < high) each(run.address + (low - at), high - low, low - begin);
            at += run.nbytes;
        }
    }
}

}  // namespace

std::shared_ptr<Device> Device::open(int ordinal) {
    const Driver& driver = Driver::open();
    int count = 0;
    driver.require(driver.device_count(&count), "cuDeviceGetCount");
    if (ordinal < 0 || ordinal >= count) {
        throw Error(Code::kConfig, "device 'cuda:" + std::to_string(ordinal) + "' is not available: the driver counts " +
                                       std::to_string(count) + " devices; name one of them, or set device='cpu'");
    }
    Ordinal device = 0;
    driver.require(driver.device_get(&device, ordinal), "cuDeviceGet");
    return std::shared_ptr<Device>(new Device(driver, ordinal, device));
}

Device::Device(const Driver& driver, int ordinal, Ordinal device) : driver_(driver), ordinal_(ordinal), device_(device) {
    int maps = 0, rdma = 0;
    driver_.require(driver_.device_attribute(&maps, kVmmSupported, device_), "cuDeviceGetAttribute");
    if (maps == 0) {
        throw Error(Code::kConfig, "device 'cuda:" + std::to_string(ordinal) + "' cannot map memory by pages (CUDA's virtual memory "
                                   "management); set device='cpu'");
    }
    driver_.require(driver_.device_attribute(&rdma, kVmmRdmaSupported, device_), "cuDeviceGetAttribute");
    rdma_ = rdma != 0;
    std::size_t granularity = 0;
    const AllocationProp asked = prop();
    driver_.require(driver_.granularity(&granularity, &asked, 0), "cuMemGetAllocationGranularity");
    granularity_ = granularity;
    driver_.require(driver_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
        const Current current(*this);
        for (Stream& stream : streams_) driver_.require(driver_.stream_create(&stream, kNonBlocking), "cuStreamCreate");
    } catch (...) {
        driver_.context_release(device_);
        throw;
    }
}

Device::~Device() {
    try {
        const Current current(*this);
        for (Stream stream : streams_) driver_.stream_destroy(stream);
    } catch (const Error&) {  // the driver is shutting down: all goes with it
    }
    driver_.context_release(device_);
}

Device::Current::Current(const Device& device) : device_(device) {
    device_.driver_.require(device_.driver_.context_push(device_.context_), "cuCtxPushCurrent");
}

Device::Current::~Current() {
    Context before = nullptr;
    device_.driver_.context_pop(&before);
}

AllocationProp Device::prop() const noexcept {
    AllocationProp asked;
    asked.location.id = device_;
    asked.rdma = rdma_ ? 1 : 0;
    return asked;
}

std::uint64_t Device::total_bytes() const {
    std::size_t nbytes = 0;
    driver_.require(driver_.device_total_mem(&nbytes, device_), "cuDeviceTotalMem");
    return nbytes;
}

std::uint64_t Device::free_bytes() const {
    const Current current(*this);
    std::size_t free = 0, total = 0;
    driver_.require(driver_.mem_info(&free, &total), "cuMemGetInfo");
    return free;
}

void Device::copy(std::span<const Piece> pieces) {
    const Current current(*this);
    const Stream stream = streams_[turn_.fetch_add(1) % streams_.size()];
    Result failed = kSuccess;
    for (const Piece& piece : pieces) {
        failed = driver_.memcpy_async(address_of(piece.to), address_of(piece.from), piece.nbytes, stream);
        if (failed != kSuccess) break;
    }
    const Result ended = driver_.stream_synchronize(stream);  // also after a failure: nothing is written later
    driver_.require(failed, "cuMemcpyAsync");
    driver_.require(ended, "a copy");
}

void Device::gather(const Extents& extents, std::uint64_t begin, std::uint64_t end, std::uint64_t staged) {
    std::vector<Piece> pieces;
    each_run(extents, begin, end, [&](std::uint64_t address, std::uint64_t nbytes, std::uint64_t offset) {
        pieces.push_back({pointer(staged + offset), pointer(address), nbytes});
    });
    copy(pieces);
}

void Device::scatter(const Extents& extents, std::uint64_t begin, std::uint64_t end, std::uint64_t staged) {
    std::vector<Piece> pieces;
    each_run(extents, begin, end, [&](std::uint64_t address, std::uint64_t nbytes, std::uint64_t offset) {
        pieces.push_back({pointer(address), pointer(staged + offset), nbytes});
    });
    copy(pieces);
}

void Device::hash_blocks(const Extents& extents, std::size_t first, std::span<std::uint64_t> hashes) {
    if (first > extents.num_blocks() || hashes.size() > extents.num_blocks() - first) {
        throw Error(Code::kConfig, "blocks " + std::to_string(first) + " to " + std::to_string(first + hashes.size()) +
                                       " are not among " + std::to_string(extents.num_blocks()));
    }
    std::vector<std::byte> bounce(std::min(kBounceBytes, std::max<std::uint64_t>(extents.block_bytes(), 1)));
    Hasher hasher;
    std::vector<Piece> pieces;
    std::uint64_t filled = 0;
    const auto flush = [&] {
        copy(pieces);
        hasher.update(bounce.data(), filled);
        pieces.clear();
        filled = 0;
    };
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        hasher.reset();
        for (const Run& run : extents.runs_of(first + i)) {
            for (std::uint64_t done = 0, n; done < run.nbytes; done += n) {
                n = std::min<std::uint64_t>(run.nbytes - done, bounce.size() - filled);
                pieces.push_back({bounce.data() + filled, pointer(run.address + done), n});
                filled += n;
                if (filled == bounce.size()) flush();
            }
        }
        flush();
        hashes[i] = hasher.digest();
    }
}

std::uint64_t Device::make_stream() {
    const Current current(*this);
    Stream stream = nullptr;
    driver_.require(driver_.stream_create(&stream, kNonBlocking), "cuStreamCreate");
    return address_of(stream);
}

void Device::drop_stream(std::uint64_t stream) noexcept { driver_.stream_destroy(pointer(stream)); }

bool Device::is_idle(std::uint64_t stream) {
    const Current current(*this);
    const Result state = driver_.stream_query(pointer(stream));
    if (state == kNotReady) return false;
    driver_.require(state, "what was enqueued on a stream");
    return true;
}

DeviceBuffer::DeviceBuffer(std::shared_ptr<Device> device, std::uint64_t nbytes) : device_(std::move(device)), nbytes_(nbytes) {
    const Device::Current current(*device_);
    const Result code = device_->driver().mem_alloc(&address_, nbytes);
    if (code == kOutOfMemory) {
        throw Error(Code::kConfig, "device 'cuda:" + std::to_string(device_->ordinal()) + "' has " + std::to_string(device_->free_bytes()) +
                                       " bytes free and a buffer needs " + std::to_string(nbytes) + "; make hbm smaller");
    }
    device_->driver().require(code, "cuMemAlloc");
}

DeviceBuffer::~DeviceBuffer() {
    try {
        const Device::Current current(*device_);
        device_->driver().mem_free(address_);
    } catch (const Error&) {  // the driver is shutting down
    }
}

}  // namespace poolweave::cuda
