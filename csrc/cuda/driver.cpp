#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "core/error.hpp"

namespace poolweave::cuda {
namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(Code::kConfig, "device 'cuda' is not available: " + why + "; set device='cpu'");
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) refuse(std::string("the driver has no ") + name + ": it is too old");
}

Driver load() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) refuse(std::string("no driver (") + dlerror() + ")");
    Driver d{};
    find(library, "cuInit", d.init);
    find(library, "cuGetErrorString", d.error_string);
    find(library, "cuDeviceGetCount", d.device_count);
    find(library, "cuDeviceGet", d.device_get);
    find(library, "cuDeviceGetAttribute", d.device_attribute);
    find(library, "cuDeviceTotalMem_v2", d.device_total_mem);
    find(library, "cuDevicePrimaryCtxRetain", d.context_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", d.context_release);
    find(library, "cuCtxPushCurrent_v2", d.context_push);
    find(library, "cuCtxPopCurrent_v2", d.context_pop);
    find(library, "cuMemGetInfo_v2", d.mem_info);
    find(library, "cuMemGetAllocationGranularity", d.granularity);
    find(library, "cuMemAddressReserve", d.address_reserve);
    find(library, "cuMemAddressFree", d.address_free);
    find(library, "cuMemCreate", d.mem_create);
    find(library, "cuMemRelease", d.mem_release);
    find(library, "cuMemMap", d.mem_map);
    find(library, "cuMemUnmap", d.mem_unmap);
    find(library, "cuMemSetAccess", d.mem_set_access);
    find(library, "cuMemAlloc_v2", d.mem_alloc);
    find(library, "cuMemFree_v2", d.mem_free);
    find(library, "cuMemHostRegister_v2", d.host_register);
    find(library, "cuMemHostUnregister", d.host_unregister);
    find(library, "cuMemcpyAsync", d.memcpy_async);
    find(library, "cuStreamCreate", d.stream_create);
    find(library, "cuStreamDestroy_v2", d.stream_destroy);
    find(library, "cuStreamSynchronize", d.stream_synchronize);
    find(library, "cuStreamQuery", d.stream_query);
    if (const Result code = d.init(0); code != kSuccess) refuse("the driver says " + std::to_string(code) + " to cuInit");
    return d;
}

}  // namespace

const Driver& Driver::open() {
    static std::mutex mutex;
    static const Driver* loaded = nullptr;
    const std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = new Driver(load());  // for the life of the process, as the library
    return *loaded;
}

void Driver::require(Result code, const char* what) const {
    if (code != kSuccess) throw Error(Code::kOs, std::string(what) + " failed: " + text(code));
}

std::string Driver::text(Result code) const {
    const char* said = nullptr;
    if (error_string(code, &said) != kSuccess || said == nullptr) said = "unknown error";
    return std::string(said) + " (CUDA error " + std::to_string(code) + ")";
}

}  // namespace poolweave::cuda
