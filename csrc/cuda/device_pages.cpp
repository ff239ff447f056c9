#include "cuda/device_pages.hpp"

#include <string>
#include <utility>

#include "core/error.hpp"

namespace poolweave::cuda {

DevicePages::DevicePages(std::shared_ptr<Device> device, std::uint64_t num_pages, std::uint64_t page_bytes)
    : device_(std::move(device)), driver_(device_->driver()), page_bytes_(page_bytes), handles_(num_pages, 0) {
    if (page_bytes % device_->granularity() != 0) {
        throw Error(Code::kConfig, "page_bytes=" + std::to_string(page_bytes) + " is no multiple of " +
                                       std::to_string(device_->granularity()) + ", the device's own unit; set page_bytes to that");
    }
}

DevicePages::~DevicePages() {
    for (const Handle handle : handles_) {
        if (handle != 0) driver_.mem_release(handle);
    }
}

std::byte* DevicePages::reserve(std::uint64_t nbytes, std::uint64_t alignment) {
    Address base = 0;
    driver_.require(driver_.address_reserve(&base, nbytes, alignment, 0, 0), "cuMemAddressReserve");
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(base));
}

void DevicePages::unreserve(std::byte* base, std::uint64_t nbytes) noexcept {
    unmap(base, nbytes);
    driver_.address_free(reinterpret_cast<std::uintptr_t>(base), nbytes);
}

void DevicePages::map(std::byte* at, std::uint64_t offset, std::uint64_t nbytes) {
    const Device::Current current(*device_);
    const std::lock_guard lock(mutex_);
    const Address first = reinterpret_cast<std::uintptr_t>(at);
    for (std::uint64_t done = 0; done < nbytes; done += page_bytes_) {
        const std::uint64_t page = (offset + done) / page_bytes_;
        if (handles_[page] == 0) create(page);
        driver_.require(driver_.mem_map(first + done, page_bytes_, 0, handles_[page], 0), "cuMemMap");
        mapped_.insert(first + done);
    }
    AccessDesc access;
    access.location = device_->prop().location;
    driver_.require(driver_.mem_set_access(first, nbytes, &access, 1), "cuMemSetAccess");
}

void DevicePages::create(std::uint64_t page) {
    const AllocationProp asked = device_->prop();
    const Result code = driver_.mem_create(&handles_[page], page_bytes_, &asked, 0);
    if (code == kOutOfMemory) {
        handles_[page] = 0;
        throw Error(Code::kConfig, "device 'cuda:" + std::to_string(device_->ordinal()) + "' has " + std::to_string(device_->free_bytes()) +
                                       " bytes left for another page of " + std::to_string(page_bytes_) + " after " +
                                       std::to_string(num_resident_) + " of this pool; make hbm smaller");
    }
    driver_.require(code, "cuMemCreate");
    ++num_resident_;
}

// Page by page: a part of a mapping can be there after a failure, and the driver takes no range with holes.
bool DevicePages::unmap(std::byte* at, std::uint64_t nbytes) noexcept {
    const std::lock_guard lock(mutex_);
    const Address first = reinterpret_cast<std::uintptr_t>(at);
    bool well = true;
    for (std::uint64_t done = 0; done < nbytes && !mapped_.empty(); done += page_bytes_) well = unmap_one(first + done) && well;
    return well;
}

bool DevicePages::unmap_one(Address at) noexcept {
    if (mapped_.erase(at) == 0) return true;
    return driver_.mem_unmap(at, page_bytes_) == kSuccess;
}

void DevicePages::release(std::uint64_t offset, std::uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    for (std::uint64_t page = offset / page_bytes_; page < (offset + nbytes) / page_bytes_; ++page) {
        const Handle handle = std::exchange(handles_[page], 0);
        if (handle == 0) continue;
        --num_resident_;
        driver_.require(driver_.mem_release(handle), "cuMemRelease");
    }
}

std::uint64_t DevicePages::resident_bytes() const {
    const std::lock_guard lock(mutex_);
    return num_resident_ * page_bytes_;
}

}  // namespace poolweave::cuda
