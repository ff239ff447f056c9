#include "cuda/registration.hpp"

#include "core/error.hpp"

namespace poolweave::cuda {
namespace {

constexpr unsigned kPortable = 1;  // for all contexts

}  // namespace

// All pages or none.
Pinner::Result Registration::pin(std::byte* at, std::uint64_t nbytes) {
    const Driver& driver = device_->driver();
    const Device::Current current(*device_);
    for (std::uint64_t done = 0; done < nbytes; done += page_bytes_) {
        const cuda::Result code = driver.host_register(at + done, page_bytes_, kPortable);
        if (code == kSuccess) continue;
        while (done > 0) driver.host_unregister(at + (done -= page_bytes_));
        return {driver.text(code), "the driver registers no more of the host's memory; make dram smaller", 0};
    }
    return {};
}

void Registration::unpin(std::byte* at) noexcept {
    try {
        const Device::Current current(*device_);
        device_->driver().host_unregister(at);
    } catch (const Error&) {  // the driver is shutting down
    }
}

}  // namespace poolweave::cuda
