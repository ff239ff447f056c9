// One function a concept; module.cpp calls them in order. Bindings only convert: no logic lives here.
#pragma once

#include <nanobind/nanobind.h>

namespace poolweave::bindings {

void register_arena(nanobind::module_& m);
void register_blocks(nanobind::module_& m);
void register_block_list(nanobind::module_& m);  // by register_blocks
void register_radix(nanobind::module_& m);
void register_eviction(nanobind::module_& m);  // by register_radix
void register_catalogue(nanobind::module_& m);
void register_intake(nanobind::module_& m);  // by register_catalogue
void register_events(nanobind::module_& m);
void register_copy(nanobind::module_& m);
void register_device(nanobind::module_& m);  // after register_arena, register_blocks and register_copy
void register_stream(nanobind::module_& m);
void register_channel(nanobind::module_& m);
void register_prompt_tree(nanobind::module_& m);
void register_candidates(nanobind::module_& m);  // after register_prompt_tree
void register_simulation(nanobind::module_& m);
void register_decode(nanobind::module_& m);
void register_workers(nanobind::module_& m);

}  // namespace poolweave::bindings
