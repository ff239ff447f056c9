// A stand-in for libcuda.so.1, made of host memory: what the driver's API promises as far as it is used, and no more.
// It is strict where the driver is: mappings must be whole, address space empty before it is freed, and access is only
// given by cuMemSetAccess. Streams do their copies at once unless they are held (`stand_in_hold`), as by a kernel that
// runs long.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Result = int;
using Address = unsigned long long;

constexpr std::size_t kGranularity = 2u << 20;
constexpr Result kInvalid = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100, kNoContext = 201, kNotReady = 600;

struct Location {
    int type, id;
};
struct Prop {
    int type, handles;
    Location location;
    void* win32;
    unsigned char rest[8];
};
struct Access {
    Location location;
    int flags;
};
struct Allocation {
    int fd;
    std::size_t nbytes;
    int users;  // its handle, and each mapping
};
struct Mapping {
    std::size_t nbytes;
    Address handle;
};
struct Stream {
    std::atomic<int> held{0};
    std::atomic<bool> failed{false};
};

std::mutex mutex;
bool initialized = false;
int num_devices = 0;
std::size_t memory = 0;  // of a device
std::size_t used = 0;
int contexts = 0;
int live_streams = 0;
Address next_handle = 1;
std::map<Address, Allocation> allocations;
std::map<Address, std::size_t> reserved;
std::map<Address, Mapping> mappings;
std::map<Address, std::size_t> buffers;
std::map<Address, std::size_t> registered;
std::size_t num_registered = 0, most_registered = ~std::size_t{0};
thread_local int pushed = 0;
std::vector<std::unique_ptr<Stream>> old_streams;
int dummy_context;

void drop(Address handle) {
    const auto found = allocations.find(handle);
    if (--found->second.users > 0) return;
    close(found->second.fd);
    used -= found->second.nbytes;
    allocations.erase(found);
}

}  // namespace

extern "C" {

// --- what a test sets and asks ---------------------------------------------------------------------------------
void stand_in_set(int devices, unsigned long long nbytes) {
    const std::lock_guard lock(mutex);
    num_devices = devices;
    memory = nbytes;
}
unsigned long long stand_in_used() {
    const std::lock_guard lock(mutex);
    return used;
}
void stand_in_register_at_most(unsigned long long nbytes) { most_registered = nbytes; }
unsigned long long stand_in_registered() {
    const std::lock_guard lock(mutex);
    return num_registered;
}
int stand_in_left() {  // things that were not given back
    const std::lock_guard lock(mutex);
    return static_cast<int>(allocations.size() + reserved.size() + mappings.size() + buffers.size() + registered.size()) + contexts + live_streams;
}
void stand_in_hold(void* stream) { static_cast<Stream*>(stream)->held.fetch_add(1); }
void stand_in_go_on(void* stream) { static_cast<Stream*>(stream)->held.fetch_sub(1); }
void stand_in_fail(void* stream) { static_cast<Stream*>(stream)->failed = true; }

// --- the driver ------------------------------------------------------------------------------------------------
Result cuInit(unsigned flags) {
    const std::lock_guard lock(mutex);
    initialized = true;
    return flags == 0 ? 0 : kInvalid;
}
Result cuGetErrorString(Result code, const char** text) {
    *text = code == kOutOfMemory ? "out of memory" : code == kInvalid ? "invalid argument" : "something of the stand-in's";
    return 0;
}
Result cuDeviceGetCount(int* count) {
    *count = num_devices;
    return initialized ? 0 : kNotInitialized;
}
Result cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < num_devices ? 0 : kNoDevice;
}
Result cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 102;
    return 0;
}
Result cuDeviceTotalMem_v2(std::size_t* nbytes, int) {
    *nbytes = memory;
    return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int) {
    const std::lock_guard lock(mutex);
    ++contexts;
    *context = &dummy_context;
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    const std::lock_guard lock(mutex);
    --contexts;
    return 0;
}
Result cuCtxPushCurrent_v2(void* context) {
    ++pushed;
    return context == &dummy_context ? 0 : kInvalid;
}
Result cuCtxPopCurrent_v2(void** context) {
    if (pushed == 0) return kNoContext;
    --pushed;
    *context = &dummy_context;
    return 0;
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    const std::lock_guard lock(mutex);
    *free = memory - used;
    *total = memory;
    return pushed > 0 ? 0 : kNoContext;
}
Result cuMemGetAllocationGranularity(std::size_t* nbytes, const Prop* prop, int) {
    *nbytes = kGranularity;
    return prop->type == 1 && prop->location.type == 1 ? 0 : kInvalid;
}
Result cuMemAddressReserve(Address* address, std::size_t nbytes, std::size_t alignment, Address, unsigned long long) {
    if (nbytes % kGranularity != 0) return kInvalid;
    void* const got = mmap(nullptr, nbytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return kOutOfMemory;
    const auto first = reinterpret_cast<Address>(got);
    const Address base = (first + alignment - 1) / alignment * alignment;
    if (base > first) munmap(got, base - first);
    munmap(reinterpret_cast<void*>(base + nbytes), first + alignment - base);
    const std::lock_guard lock(mutex);
    reserved[base] = nbytes;
    *address = base;
    return 0;
}
Result cuMemAddressFree(Address address, std::size_t nbytes) {
    const std::lock_guard lock(mutex);
    const auto found = reserved.find(address);
    if (found == reserved.end() || found->second != nbytes) return kInvalid;
    const auto inside = mappings.lower_bound(address);
    if (inside != mappings.end() && inside->first < address + nbytes) return kInvalid;
    munmap(reinterpret_cast<void*>(address), nbytes);
    reserved.erase(found);
    return 0;
}
Result cuMemCreate(Address* handle, std::size_t nbytes, const Prop* prop, unsigned long long) {
    const std::lock_guard lock(mutex);
    if (nbytes % kGranularity != 0 || prop->type != 1 || prop->location.id >= num_devices) return kInvalid;
    if (used + nbytes > memory) return kOutOfMemory;
    const int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
    used += nbytes;
    allocations[next_handle] = {fd, nbytes, 1};
    *handle = next_handle++;
    return 0;
}
Result cuMemRelease(Address handle) {
    const std::lock_guard lock(mutex);
    if (allocations.count(handle) == 0) return kInvalid;
    drop(handle);
    return 0;
}
Result cuMemMap(Address address, std::size_t nbytes, std::size_t offset, Address handle, unsigned long long) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(handle);
    auto range = reserved.upper_bound(address);
    if (found == allocations.end() || offset + nbytes > found->second.nbytes || range == reserved.begin()) return kInvalid;
    --range;
    if (address + nbytes > range->first + range->second || mappings.count(address) != 0) return kInvalid;
    if (mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, static_cast<off_t>(offset)) ==
        MAP_FAILED) {
        return kOutOfMemory;
    }
    ++found->second.users;
    mappings[address] = {nbytes, handle};
    return 0;
}
Result cuMemUnmap(Address address, std::size_t nbytes) {
    const std::lock_guard lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.nbytes != nbytes) return kInvalid;
    mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    drop(found->second.handle);
    mappings.erase(found);
    return 0;
}
Result cuMemSetAccess(Address address, std::size_t nbytes, const Access* access, std::size_t count) {
    const std::lock_guard lock(mutex);
    if (count != 1 || access->flags != 3) return kInvalid;
    for (Address at = address; at < address + nbytes;) {
        const auto found = mappings.find(at);
        if (found == mappings.end()) return kInvalid;
        at += found->second.nbytes;
    }
    return mprotect(reinterpret_cast<void*>(address), nbytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalid;
}
Result cuMemAlloc_v2(Address* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex);
    if (pushed == 0) return kNoContext;
    if (used + nbytes > memory) return kOutOfMemory;
    void* const got = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return kOutOfMemory;
    used += nbytes;
    *address = reinterpret_cast<Address>(got);
    buffers[*address] = nbytes;
    return 0;
}
Result cuMemFree_v2(Address address) {
    const std::lock_guard lock(mutex);
    const auto found = buffers.find(address);
    if (pushed == 0 || found == buffers.end()) return pushed == 0 ? kNoContext : kInvalid;
    munmap(reinterpret_cast<void*>(address), found->second);
    used -= found->second;
    buffers.erase(found);
    return 0;
}
Result cuMemHostRegister_v2(void* at, std::size_t nbytes, unsigned) {
    const std::lock_guard lock(mutex);
    const auto address = reinterpret_cast<Address>(at);
    const auto next = registered.lower_bound(address);
    if (pushed == 0) return kNoContext;
    if (next != registered.end() && next->first < address + nbytes) return kInvalid;
    if (next != registered.begin() && std::prev(next)->first + std::prev(next)->second > address) return kInvalid;
    if (num_registered + nbytes > most_registered) return kOutOfMemory;
    num_registered += nbytes;
    registered[address] = nbytes;
    return 0;
}
Result cuMemHostUnregister(void* at) {
    const std::lock_guard lock(mutex);
    const auto found = registered.find(reinterpret_cast<Address>(at));
    if (pushed == 0 || found == registered.end()) return pushed == 0 ? kNoContext : kInvalid;
    num_registered -= found->second;
    registered.erase(found);
    return 0;
}
Result cuMemcpyAsync(Address to, Address from, std::size_t nbytes, void*) {
    if (pushed == 0) return kNoContext;
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
    return 0;
}
Result cuStreamCreate(void** stream, unsigned) {
    const std::lock_guard lock(mutex);
    if (pushed == 0) return kNoContext;
    ++live_streams;
    *stream = new Stream;
    return 0;
}
Result cuStreamDestroy_v2(void* stream) {
    const std::lock_guard lock(mutex);
    --live_streams;
    old_streams.emplace_back(static_cast<Stream*>(stream));  // who holds it may still let go
    return 0;
}
Result cuStreamQuery(void* stream) {
    auto* const one = static_cast<Stream*>(stream);
    if (one->failed) return kInvalid;
    return one->held > 0 ? kNotReady : 0;
}
Result cuStreamSynchronize(void* stream) {
    Result state = kNotReady;
    while ((state = cuStreamQuery(stream)) == kNotReady) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return state;
}

}  // extern "C"
