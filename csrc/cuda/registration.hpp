// Host memory that a device reads and writes by itself, without the driver's buffers: pages registered one by one.
#pragma once

#include <memory>

#include "core/pinner.hpp"
#include "cuda/device.hpp"

namespace poolweave::cuda {

class Registration : public Pinner {
  public:
    Registration(std::shared_ptr<Device> device, std::uint64_t page_bytes) : device_(std::move(device)), page_bytes_(page_bytes) {}

    Result pin(std::byte* at, std::uint64_t nbytes) override;
    void unpin(std::byte* at) noexcept override;

  private:
    std::shared_ptr<Device> device_;
    std::uint64_t page_bytes_;
};

}  // namespace poolweave::cuda
