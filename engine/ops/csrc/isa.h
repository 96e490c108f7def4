// What every isa_*.cpp needs before it opens its target: inline functions from here stay plain, whichever file they
// land in.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"
#include "threads.h"

// TWINPOOL_BEGIN_ISA("avx2,fma") ... TWINPOOL_END_ISA: functions between them may use these instructions.
#define TWINPOOL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TWINPOOL_BEGIN_ISA(isa) TWINPOOL_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define TWINPOOL_END_ISA TWINPOOL_PRAGMA(clang attribute pop)
#else
#define TWINPOOL_BEGIN_ISA(isa) TWINPOOL_PRAGMA(GCC push_options) TWINPOOL_PRAGMA(GCC target(isa))
#define TWINPOOL_END_ISA TWINPOOL_PRAGMA(GCC pop_options)
#endif
