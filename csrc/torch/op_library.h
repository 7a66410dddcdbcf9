// op_library.h - Registers ops in the namespace SPARSE_CE_NAMESPACE. One process can load two builds of this package if
// their namespaces differ: build.toml passes a name that is unique to a build.
#pragma once

#include "../torch_calls.h"

#include <torch/csrc/stable/library.h>

#ifndef SPARSE_CE_NAMESPACE
#define SPARSE_CE_NAMESPACE sparse_ce
#endif

// STABLE_TORCH_LIBRARY turns its argument into a string. The macro in between expands the argument first.
#define SCE_EXPANDED_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define SCE_EXPANDED_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define SCE_LIBRARY(m) SCE_EXPANDED_LIBRARY(SPARSE_CE_NAMESPACE, m)
#define SCE_LIBRARY_IMPL(key, m) SCE_EXPANDED_LIBRARY_IMPL(SPARSE_CE_NAMESPACE, key, m)
