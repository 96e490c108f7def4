// All kernels for one instruction set; each isa_*.cpp includes this inside its own namespace and target.
// The system headers are included by the isa_*.cpp, outside of them.

#include "simd.inl"

#include "panel.inl"

#include "quantize.inl"

#include "attention.inl"
#include "compressed.inl"
#include "elementwise.inl"
#include "kv_store.inl"
#include "latent.inl"
#include "linear.inl"
#include "moe.inl"
#include "sampling.inl"
#include "streams.inl"

const Kernels kernels = {linear,           quantize,      num_digits,   store_kv,        attention,
                         latent_attention, merge_attention, merge_latent_attention, store_latents, rms_norm, rope,
                         silu_mul,         gating,        combine,      shared_attention, index_scores,
                         pool_windows,     streams_in,    streams_out, choose};
