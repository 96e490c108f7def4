// The same over shared memory: each row is copied to its place in the receiver's memory, and only header and checksums
// go over the socket.
//
// How far the sender is, both see in a page that they share. It is of no authority: who lies there has rows verified
// before they are in place, which then fail; the receiver bounds what it reads, and where nothing is seen to move it
// sleeps on the socket, as if there were no such page.
#pragma once

#include <atomic>

#include "stream.h"

struct Progress {
  alignas(64) std::atomic<uint64_t> placed;   // number of the message, 24 bits, and bytes of its rows, 40 bits
  alignas(64) std::atomic<uint32_t> sleeps;   // the receiver wants to be told over the socket
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Copies the rows `there`: 1 when the whole message is out, 0 when the socket has no more room, or -errno. put: the
// number of this message on its link, counted at both ends.
EXPORT int twinpool_kv_write(int socket, RowStream* stream, uint8_t* const* there, Progress* progress, uint32_t put);

// Hashes rows as they come to be in place, and waits for their checksums: 1, or 0 when the other end has closed, or
// -errno.
EXPORT int twinpool_kv_verify(int socket, RowStream* stream, uint64_t* sent_checksums, Progress* progress, uint32_t put);
