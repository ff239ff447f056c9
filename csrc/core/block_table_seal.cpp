// Sealing: the word of a block's producer that its KV, or that of its first layers, is written.
#include <algorithm>
#include <string>

#include "core/block_table.hpp"
#include "core/error.hpp"

namespace poolweave {

void BlockTable::seal(Handles handles) {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t handle : handles) (void)get(handle);
    for (const std::uint64_t handle : handles) blocks_[id_of(handle)].flags |= kSealed;
}

void BlockTable::seal_layers(Handles handles, std::uint32_t first, std::uint32_t last) {
    const std::lock_guard lock(mutex_);
    if (last > num_layers_) {
        throw Error(Code::kConfig, "layers up to " + std::to_string(last) + " of " + std::to_string(num_layers_) + " cannot be sealed",
                    {last, num_layers_});
    }
    for (const std::uint64_t handle : handles) {
        (void)get(handle);
        const std::uint32_t sealed = layers_of(id_of(handle));
        if (first <= sealed) continue;
        throw Error(Code::kConfig, "layer " + std::to_string(first) + " cannot be sealed before layer " + std::to_string(sealed),
                    {first, sealed});
    }
    plain_ = false;
    if (layers_.empty()) layers_.resize(blocks_.size());
    for (const std::uint64_t handle : handles) {
        std::uint16_t& layers = layers_[id_of(handle)];
        layers = std::max(layers, static_cast<std::uint16_t>(last));
        if (layers == num_layers_) blocks_[id_of(handle)].flags |= kSealed;
    }
}

void BlockTable::sealed_layers(Handles handles, std::span<std::uint16_t> out) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < handles.size(); ++i) {
        (void)get(handles[i]);
        out[i] = static_cast<std::uint16_t>(layers_of(id_of(handles[i])));
    }
}

std::uint32_t BlockTable::layers_of(std::uint32_t id) const noexcept {
    if ((blocks_[id].flags & kSealed) != 0) return num_layers_;
    return id < layers_.size() ? layers_[id] : 0;
}

}  // namespace poolweave
