// Pages of a device's memory by CUDA's virtual memory management: an allocation a page, private to this process.
// What is not mapped faults.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "core/page_source.hpp"
#include "cuda/device.hpp"

namespace poolweave::cuda {

class DevicePages : public PageSource {
  public:
    // Throws kConfig for a page size that is no multiple of the device's.
    DevicePages(std::shared_ptr<Device> device, std::uint64_t num_pages, std::uint64_t page_bytes);
    ~DevicePages() override;

    std::byte* reserve(std::uint64_t nbytes, std::uint64_t alignment) override;
    void unreserve(std::byte* base, std::uint64_t nbytes) noexcept override;
    void map(std::byte* at, std::uint64_t offset, std::uint64_t nbytes) override;
    bool unmap(std::byte* at, std::uint64_t nbytes) noexcept override;
    void release(std::uint64_t offset, std::uint64_t nbytes) override;
    std::uint64_t resident_bytes() const override;

  private:
    void create(std::uint64_t page);
    bool unmap_one(Address at) noexcept;

    std::shared_ptr<Device> device_;
    const Driver& driver_;
    std::uint64_t page_bytes_;
    mutable std::mutex mutex_;  // guards what follows
    std::vector<Handle> handles_;  // by page; 0: no memory
    std::uint64_t num_resident_ = 0;
    std::unordered_set<Address> mapped_;  // pages of address space
};

}  // namespace poolweave::cuda
