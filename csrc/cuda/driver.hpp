// NVIDIA's driver, opened at run time: nothing is linked, and a machine without it runs everything else.
// The types are those of cuda.h, as far as they are used; tests/csrc/test_cuda_driver.cpp
// holds them against that header where it is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace poolweave::cuda {

using Result = int;
using Ordinal = int;
using Address = unsigned long long;
using Handle = unsigned long long;
using Context = void*;
using Stream = void*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr int kVmmSupported = 102;         // attributes of a device
inline constexpr int kVmmRdmaSupported = 110;
inline constexpr unsigned kNonBlocking = 1;       // of a stream: it does not wait for the default one

struct Location {
    int type = 1;  // a device
    int id = 0;
};

struct AllocationProp {
    int type = 1;  // pinned to its location
    int handle_types = 0;
    Location location;
    void* win32 = nullptr;
    unsigned char compression = 0;
    unsigned char rdma = 0;  // GPUDirect RDMA may reach it
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
};

struct AccessDesc {
    Location location;
    int flags = 3;  // read and write
};

// The functions, by the names that the header's macros stand for.
struct Driver {
    // Opens libcuda.so.1 and initialises it. Throws kConfig where there is none, or it has no device.
    static const Driver& open();
    // Throws kOs naming `what` and what the driver says of `code`, unless it is kSuccess.
    void require(Result code, const char* what) const;
    std::string text(Result code) const;

    Result (*init)(unsigned);
    Result (*error_string)(Result, const char**);
    Result (*device_count)(int*);
    Result (*device_get)(Ordinal*, int);
    Result (*device_attribute)(int*, int, Ordinal);
    Result (*device_total_mem)(std::size_t*, Ordinal);
    Result (*context_retain)(Context*, Ordinal);
    Result (*context_release)(Ordinal);
    Result (*context_push)(Context);
    Result (*context_pop)(Context*);
    Result (*mem_info)(std::size_t*, std::size_t*);
    Result (*granularity)(std::size_t*, const AllocationProp*, int);
    Result (*address_reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long);
    Result (*address_free)(Address, std::size_t);
    Result (*mem_create)(Handle*, std::size_t, const AllocationProp*, unsigned long long);
    Result (*mem_release)(Handle);
    Result (*mem_map)(Address, std::size_t, std::size_t, Handle, unsigned long long);
    Result (*mem_unmap)(Address, std::size_t);
    Result (*mem_set_access)(Address, std::size_t, const AccessDesc*, std::size_t);
    Result (*mem_alloc)(Address*, std::size_t);
    Result (*mem_free)(Address);
    Result (*host_register)(void*, std::size_t, unsigned);
    Result (*host_unregister)(void*);
    Result (*memcpy_async)(Address, Address, std::size_t, Stream);
    Result (*stream_create)(Stream*, unsigned);
    Result (*stream_destroy)(Stream);
    Result (*stream_synchronize)(Stream);
    Result (*stream_query)(Stream);
};

}  // namespace poolweave::cuda
