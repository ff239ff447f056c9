// The catalogue as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/radix_results.hpp"
#include "core/catalogue.hpp"

namespace poolweave::bindings {

constexpr std::size_t kLongPrompt = 32 << 10;  // tokens: about 20 us out of cold memory

// The catalogue with the index it looks into.
struct Pair {
    nanobind::object owner;
    RadixTree& tree;
    Catalogue catalogue;

    template <class Call>
    auto run(Tokens tokens, Call&& call) {
        return without_gil(tokens.size() > kLongPrompt || !tree.idle(), call);
    }
};

}  // namespace poolweave::bindings
