// A device's pages, copies and hashes, against the stand-in for the driver (stand_in_cuda.cpp), which is linked here and
// so is what the product opens. Where NVIDIA's header is installed, our declarations are held against it.
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/arena.hpp"
#include "core/checksum.hpp"
#include "core/copy.hpp"
#include "core/error.hpp"
#include "core/range.hpp"
#include "core/swap.hpp"
#include "cuda/device.hpp"
#include "cuda/device_pages.hpp"
#include "cuda/registration.hpp"

#if __has_include(<cuda.h>)
#include <cuda.h>
namespace {
namespace ours = poolweave::cuda;
static_assert(sizeof(CUmemAllocationProp) == sizeof(ours::AllocationProp) && sizeof(CUmemAccessDesc) == sizeof(ours::AccessDesc));
static_assert(offsetof(CUmemAllocationProp, location) == offsetof(ours::AllocationProp, location));
static_assert(offsetof(CUmemAllocationProp, allocFlags) == offsetof(ours::AllocationProp, compression));
static_assert(offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) == offsetof(ours::AllocationProp, rdma));
static_assert(offsetof(CUmemAccessDesc, flags) == offsetof(ours::AccessDesc, flags));
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == 1 && CU_MEM_LOCATION_TYPE_DEVICE == 1 && CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3);
static_assert(CU_MEM_ALLOC_GRANULARITY_MINIMUM == 0 && CU_STREAM_NON_BLOCKING == ours::kNonBlocking);
static_assert(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == ours::kVmmSupported);
static_assert(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED == ours::kVmmRdmaSupported);
static_assert(CUDA_ERROR_OUT_OF_MEMORY == ours::kOutOfMemory && CUDA_ERROR_NOT_READY == ours::kNotReady);
static_assert(sizeof(CUdeviceptr) == sizeof(ours::Address) && sizeof(CUmemGenericAllocationHandle) == sizeof(ours::Handle));
}  // namespace
#endif

using poolweave::Arena;
using poolweave::Code;
using poolweave::Error;
using poolweave::Extents;
using poolweave::Grid;
using poolweave::Range;
using poolweave::cuda::Device;
using poolweave::cuda::DeviceBuffer;
using poolweave::cuda::DevicePages;
using poolweave::cuda::Registration;

extern "C" {
void stand_in_set(int devices, unsigned long long nbytes);
unsigned long long stand_in_used();
int stand_in_left();
void stand_in_register_at_most(unsigned long long nbytes);
unsigned long long stand_in_registered();
void stand_in_hold(void* stream);
void stand_in_go_on(void* stream);
void stand_in_fail(void* stream);
}

namespace {

constexpr std::uint64_t kPage = 2u << 20;

std::shared_ptr<Arena> arena_on(const std::shared_ptr<Device>& device, std::uint64_t pages, std::uint64_t budget) {
    return Arena::create_of(std::make_unique<DevicePages>(device, pages, kPage), pages * kPage, budget * kPage, kPage);
}

void test_a_device_that_is_not_there_is_refused() {
    stand_in_set(0, 0);
    CHECK_THROWS(Device::open(0), Code::kConfig);
    stand_in_set(1, 64 * kPage);
    CHECK_THROWS(Device::open(1), Code::kConfig);
    CHECK_THROWS(Device::open(-1), Code::kConfig);
}

void test_pages_come_and_go() {
    const auto device = Device::open(0);
    CHECK(device->granularity() == kPage && device->total_bytes() == 64 * kPage);
    CHECK_THROWS(DevicePages(device, 4, 64 << 10), Code::kConfig);
    const auto arena = arena_on(device, 16, 8);
    CHECK_THROWS(arena->data_fd(), Code::kConfig);
    CHECK_THROWS(arena->readonly_fd(), Code::kConfig);
    {
        Range range(arena, 16 * kPage, true);
        range.map(0, 4);
        std::memset(range.data(), 7, 4 * kPage);  // the stand-in's memory is the host's
        CHECK(stand_in_used() == 4 * kPage && device->free_bytes() == 60 * kPage);
        CHECK_THROWS(range.map(4, 5), Code::kOutOfPages);  // the budget
        CHECK(range.num_mapped() == 4);
        range.map(4, 4);
        range.unmap(2, 4);
        CHECK(stand_in_used() == 8 * kPage);  // kept for the next to come
        range.map(2, 1);
        CHECK(range.data()[2 * kPage] == std::byte{7});
        arena->set_budget(5 * kPage);
        CHECK(stand_in_used() == 5 * kPage && arena->stats().resident_bytes == 5 * kPage);
        arena->check();
        range.check();
    }
    CHECK(arena->trim() == 5 * kPage);
    CHECK(stand_in_used() == 0);
}

void test_two_ranges_draw_on_one_budget() {
    const auto device = Device::open(0);
    const auto arena = arena_on(device, 8, 8);
    Range a(arena, 8 * kPage, false), b(arena, 8 * kPage, false);
    a.map(0, 5);
    CHECK_THROWS(b.map(0, 4), Code::kOutOfPages);
    b.map(0, 3);
    a.unmap(1, 3);
    b.map(3, 3);
    std::memset(b.data(), 1, 6 * kPage);
    CHECK(a.page_at(0) == 0 && b.num_mapped() == 6);
    a.check();
    b.check();
}

void test_a_device_without_memory_takes_nothing_back() {
    stand_in_set(1, 6 * kPage);
    const auto device = Device::open(0);
    const auto arena = arena_on(device, 16, 16);
    {
        Range range(arena, 16 * kPage, true);
        range.map(0, 4);
        CHECK_THROWS(range.map(4, 4), Code::kConfig);  // two of them were there before it failed
        CHECK(range.num_mapped() == 4);
        range.check();
        range.map(4, 2);
        CHECK_THROWS(DeviceBuffer(device, kPage), Code::kConfig);
    }
    arena->trim();
    CHECK(stand_in_used() == 0);
    stand_in_set(1, 64 * kPage);
}

// Blocks of two planes, aggregated on the device and layered on the host.
void test_blocks_move_between_device_and_host() {
    constexpr std::uint64_t kPlane = 48 << 10;
    const auto device = Device::open(0);
    const auto arena = arena_on(device, 2, 2);
    Range range(arena, 2 * kPage, true);
    range.map(0, 2);
    std::vector<std::byte> host(8 * 2 * kPlane), back(host.size());
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<std::byte>(i * 31 >> 7);
    const poolweave::TierGeometry layered{host.data(), kPlane, 8 * kPlane}, aggregated{range.data(), 2 * kPlane, kPlane},
        again{back.data(), kPlane, 8 * kPlane};
    const std::vector<std::int32_t> from{0, 1, 2, 5, 7}, to{3, 4, 9, 8, 0};
    device->copy(poolweave::plan_swap(layered, aggregated, from, to, 2, kPlane));
    device->copy(poolweave::plan_swap(aggregated, again, to, from, 2, kPlane));
    for (const std::int32_t slot : from) {
        for (std::uint64_t plane = 0; plane < 2; ++plane) {
            const std::uint64_t at = plane * 8 * kPlane + static_cast<std::uint64_t>(slot) * kPlane;
            CHECK(std::memcmp(host.data() + at, back.data() + at, kPlane) == 0);
        }
    }
}

void test_extents_are_staged_and_hashed_as_on_the_host() {
    constexpr std::uint32_t kSlots = 6;
    constexpr std::uint64_t kRow = 96, kPlaneBytes = 16 * kRow, kBig = 3u << 20;
    const auto device = Device::open(0);
    std::vector<std::byte> memory(kSlots * 2 * kPlaneBytes), other(memory.size());
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 131 >> 5);
    const auto grid_at = [&](std::vector<std::byte>& bytes) {
        return Grid{reinterpret_cast<std::uintptr_t>(bytes.data()), bytes.size(), kPlaneBytes, kSlots * kPlaneBytes, kRow, kRow, kSlots, 2, 16};
    };
    const std::vector<std::uint8_t> tiers(4, 0);
    const std::vector<std::int32_t> slots{4, 0, 5, 1};
    const std::vector<Grid> here{grid_at(memory)}, there{grid_at(other)};
    const Extents source(here, tiers, slots, {}), target(there, tiers, slots, {});
    const DeviceBuffer staged(device, source.nbytes());
    const std::uint64_t all = source.nbytes(), odd = 5 * kRow + 7;
    device->gather(source, 0, odd, staged.address());
    device->gather(source, odd, all, staged.address() + odd);
    device->scatter(target, source.block_bytes(), all - odd, staged.address() + source.block_bytes());
    device->scatter(target, all - odd, all, staged.address() + all - odd);
    std::vector<std::uint64_t> right(4), got(4), moved(4);
    poolweave::hash_blocks(source, 0, 4, 1, right.data());
    device->hash_blocks(source, 0, got);
    CHECK(got == right);
    device->hash_blocks(target, 0, moved);
    CHECK(moved[0] != right[0] && std::equal(moved.begin() + 1, moved.end(), right.begin() + 1));
    CHECK_THROWS(device->gather(source, 2, all + 1, staged.address()), Code::kConfig);
    CHECK_THROWS(device->gather(source, 3, 2, staged.address()), Code::kConfig);
    CHECK_THROWS(device->hash_blocks(source, 5, got), Code::kConfig);

    std::vector<std::byte> big(2 * kBig);  // blocks larger than what is hashed at once, a bit off
    for (std::size_t i = 0; i < big.size(); ++i) big[i] = static_cast<std::byte>(i * 7 >> 3);
    const std::vector<Grid> one{Grid{reinterpret_cast<std::uintptr_t>(big.data()), big.size(), 2 * kBig, kBig, kBig, kBig, 1, 2, 1}};
    const std::vector<std::uint8_t> tier{0};
    const std::vector<std::int32_t> slot{0};
    const Extents whole(one, tier, slot, {});
    std::vector<std::uint64_t> sum(1);
    device->hash_blocks(whole, 0, sum);
    CHECK(sum[0] == poolweave::checksum(big.data(), big.size()));
}

void test_a_stream_tells_when_it_is_done() {
    const auto device = Device::open(0);
    const std::uint64_t stream = device->make_stream();
    auto* const raw = reinterpret_cast<void*>(stream);
    CHECK(device->is_idle(stream));
    stand_in_hold(raw);
    CHECK(!device->is_idle(stream));
    stand_in_go_on(raw);
    CHECK(device->is_idle(stream));
    stand_in_fail(raw);
    CHECK_THROWS(device->is_idle(stream), Code::kOs);
    device->drop_stream(stream);
}

std::shared_ptr<Arena> registered_arena(const std::shared_ptr<Device>& device, poolweave::Want pinned) {
    return Arena::create(16 * kPage, 16 * kPage, kPage, {poolweave::Want::kOff, pinned, std::make_unique<Registration>(device, kPage)});
}

void test_host_pages_are_registered_while_they_are_mapped() {
    const auto device = Device::open(0);
    {
        const auto arena = registered_arena(device, poolweave::Want::kRequire);
        Range range(arena, 16 * kPage, true);
        range.map(0, 8);
        CHECK(stand_in_registered() == 8 * kPage && arena->stats().pinned_bytes == 8 * kPage);
        range.unmap(2, 3);
        CHECK(stand_in_registered() == 5 * kPage && arena->stats().pinned_bytes == 5 * kPage);
        stand_in_register_at_most(7 * kPage);
        CHECK_THROWS(range.map(8, 4), Code::kConfig);  // two of them were registered before it failed
        CHECK(stand_in_registered() == 5 * kPage && range.num_mapped() == 5);
        range.check();
    }
    CHECK(stand_in_registered() == 0);
    {
        const auto arena = registered_arena(device, poolweave::Want::kPrefer);
        Range range(arena, 16 * kPage, true);
        range.map(0, 4);
        range.map(4, 8);
        CHECK(arena->stats().pinned_bytes == 4 * kPage && range.num_mapped() == 12);
    }
    CHECK(stand_in_registered() == 0);
    stand_in_register_at_most(~0ull);
}

void test_threads_share_a_device() {
    const auto device = Device::open(0);
    const auto arena = arena_on(device, 32, 32);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] {
            Range range(arena, 8 * kPage, false);
            std::vector<std::byte> host(kPage, static_cast<std::byte>(i + 1)), back(kPage);
            for (int round = 0; round < 20; ++round) {
                range.map(0, 8);
                const poolweave::Piece out{range.data() + 3 * kPage, host.data(), kPage}, in{back.data(), range.data() + 3 * kPage, kPage};
                device->copy({&out, 1});
                device->copy({&in, 1});
                CHECK(back == host);
                range.unmap(0, 8);
            }
        });
    }
    threads.clear();
    arena->check();
}

}  // namespace

int main() {
    test_a_device_that_is_not_there_is_refused();
    test_pages_come_and_go();
    test_two_ranges_draw_on_one_budget();
    test_a_device_without_memory_takes_nothing_back();
    test_blocks_move_between_device_and_host();
    test_extents_are_staged_and_hashed_as_on_the_host();
    test_a_stream_tells_when_it_is_done();
    test_host_pages_are_registered_while_they_are_mapped();
    test_threads_share_a_device();
    CHECK(stand_in_left() == 0);
    return 0;
}
