// One GPU by its primary context, which torch and NCCL use too: copies, streams, and memory of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/extents.hpp"
#include "core/piece.hpp"
#include "cuda/driver.hpp"

namespace poolweave::cuda {

// Thread-safe. Calls make the device's context current for their own length.
class Device {
  public:
    // Throws kConfig without a driver, without that device, or when it cannot map memory by pages.
    static std::shared_ptr<Device> open(int ordinal);
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device();

    // The context is current on this thread while one of these lives.
    class Current {
      public:
        explicit Current(const Device& device);
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;
        ~Current();

      private:
        const Device& device_;
    };

    int ordinal() const noexcept { return ordinal_; }
    std::uint64_t granularity() const noexcept { return granularity_; }  // of page sizes
    std::uint64_t total_bytes() const;
    std::uint64_t free_bytes() const;
    AllocationProp prop() const noexcept;
    const Driver& driver() const noexcept { return driver_; }

    // Between any memory, the host's and the device's. Returns when the bytes are there. Throws kOs.
    void copy(std::span<const Piece> pieces);
    // Bytes [begin, end) of the runs of `extents`, laid one after the other, to `staged`, or from there.
    void gather(const Extents& extents, std::uint64_t begin, std::uint64_t end, std::uint64_t staged);
    void scatter(const Extents& extents, std::uint64_t begin, std::uint64_t end, std::uint64_t staged);
    // XXH3-64 of each block: through host memory, at the speed of the bus.
    void hash_blocks(const Extents& extents, std::size_t first, std::span<std::uint64_t> hashes);

    // A stream that others enqueue to, and whether all of it is done. Throws kOs, also for what failed there.
    std::uint64_t make_stream();
    void drop_stream(std::uint64_t stream) noexcept;
    bool is_idle(std::uint64_t stream);

  private:
    Device(const Driver& driver, int ordinal, Ordinal device);

    const Driver& driver_;
    int ordinal_;
    Ordinal device_;
    Context context_ = nullptr;
    std::uint64_t granularity_ = 0;
    bool rdma_ = false;
    std::array<Stream, 4> streams_{};  // for copies, in turn: a large one delays few others
    std::atomic<std::uint32_t> turn_ = 0;
};

// Memory of a device for as long as this lives.
class DeviceBuffer {
  public:
    DeviceBuffer(std::shared_ptr<Device> device, std::uint64_t nbytes);  // throws kConfig when there is too little
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;
    ~DeviceBuffer();

    std::uint64_t address() const noexcept { return address_; }
    std::uint64_t nbytes() const noexcept { return nbytes_; }

  private:
    std::shared_ptr<Device> device_;
    Address address_ = 0;
    std::uint64_t nbytes_;
};

}  // namespace poolweave::cuda
