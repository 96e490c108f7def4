// Whether this process may use the tiles of AMX.
#pragma once

namespace twinpool {

// Empty where it may; otherwise why not. Asks the kernel for the process's permission once, which without it ends the
// process at its first tile instruction; it holds for all threads, and grows what each has to save by 8 KiB.
const char* why_no_amx();

// Whether the processor has tiles at all.
bool has_amx();

}  // namespace twinpool
