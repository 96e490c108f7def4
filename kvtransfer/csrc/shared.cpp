#include "shared.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "look.h"
#include "xxh3.h"

using namespace twinpool;

namespace {

// What the receiver is told of at once: it hashes that while the next is copied. A multiple of a block of the hash.
constexpr size_t kToldBytes = 128 << 10;
constexpr int kNumberBits = 24, kBytesBits = 64 - kNumberBits;
constexpr uint64_t kBytesMask = (uint64_t{1} << kBytesBits) - 1;

// How long what comes next may take to be copied, on a slow machine.
int64_t next_ns(const RowStream& stream) { return kLookNs + static_cast<int64_t>(std::min(stream.row_bytes, kToldBytes)); }

// Sends what is there of header and checksums: 1, or 0 when there is no more room, or -errno.
int tell(int socket, RowStream& stream) {
  const size_t end = stream.head_bytes + sizeof(uint64_t) * (stream.hashed / stream.row_bytes);
  while (stream.moved < end) {
    const bool in_head = stream.moved < stream.head_bytes;
    const uint8_t* from = in_head ? stream.head + stream.moved
                                  : reinterpret_cast<const uint8_t*>(stream.checksums) + (stream.moved - stream.head_bytes);
    const size_t size = in_head ? stream.head_bytes - stream.moved : end - stream.moved;
    const ssize_t sent = send(socket, from, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
    }
    stream.moved += static_cast<size_t>(sent);
  }
  return 1;
}

// Says how many bytes of the rows are in place, and to a receiver that sleeps says it over the socket: as `tell`.
int publish(int socket, RowStream& stream, Progress& progress, uint32_t put) {
  fence_copies();
  progress.placed.store(uint64_t{put} << kBytesBits | stream.hashed);
  return progress.sleeps.load() ? tell(socket, stream) : 1;
}

// Up to where rows are in place, as far as the sender says: no more than there is, and only what can be hashed.
size_t in_place(const RowStream& stream, const Progress& progress, uint32_t put) {
  const size_t told = stream.moved / sizeof(uint64_t) * stream.row_bytes;
  const uint64_t placed = progress.placed.load();
  const uint32_t ahead = (static_cast<uint32_t>(placed >> kBytesBits) - put) & ((1u << kNumberBits) - 1);
  if (ahead >= 1u << (kNumberBits - 1)) return told;  // it is of an earlier one
  const size_t bytes = ahead ? all_rows(stream) : std::min<size_t>(placed & kBytesMask, all_rows(stream));
  const size_t at = bytes % stream.row_bytes, blocks = std::min(at / kBlockBytes, whole_blocks(stream.row_bytes));
  return std::max(told, bytes - at + blocks * kBlockBytes);
}

// Whether more than `seen` is soon in place; `seen` never goes back, so that a sender that takes back what it said
// cannot keep anybody looking.
bool look_for_more(const RowStream& stream, const Progress& progress, uint32_t put, size_t& seen) {
  const int64_t until = now_ns() + next_ns(stream);
  while (seen <= stream.hashed) {
    if (now_ns() > until) return false;
    relax();
    seen = std::max(seen, in_place(stream, progress, put));
  }
  return true;
}

// Takes checksums from the socket, as `recv`.
ssize_t take(int socket, RowStream& stream, uint64_t* sent_checksums) {
  const size_t total = sizeof(uint64_t) * stream.num_rows;
  ssize_t received;
  do {
    received = recv(socket, reinterpret_cast<uint8_t*>(sent_checksums) + stream.moved, total - stream.moved, 0);
  } while (received < 0 && errno == EINTR);
  if (received > 0) stream.moved += static_cast<size_t>(received);
  return received < 0 ? -errno : received;
}

}  // namespace

int twinpool_kv_write(int socket, RowStream* stream, uint8_t* const* there, Progress* progress, uint32_t put) {
  const size_t size = stream->row_bytes, blocks = whole_blocks(size);
  int told = tell(socket, *stream);  // the receiver wakes up while the first rows are copied
  size_t unsaid = 0;
  while (told == 1 && stream->hashed < all_rows(*stream)) {
    const size_t index = stream->hashed / size;
    const uint8_t* from = stream->rows[index];
    Sums sums;
    for (size_t block = 0; block < blocks;) {
      const size_t n = std::min(blocks - block, kToldBytes / kBlockBytes), at = block * kBlockBytes;
      copy_blocks(sums, there[index] + at, from + at, n, true);
      block += n;
      stream->hashed += n * kBlockBytes;
      unsaid += n * kBlockBytes;
      if (unsaid >= kToldBytes && block < blocks) {
        unsaid = 0;
        if (const int result = publish(socket, *stream, *progress, put); result < 0) return result;
      }
    }
    const size_t copied = blocks * kBlockBytes;
    std::memcpy(there[index] + copied, from + copied, size - copied);
    stream->checksums[index] = finish(sums, from, size);
    stream->hashed += size - copied;
    if (unsaid >= kToldBytes || stream->hashed == all_rows(*stream)) {
      unsaid = 0;
      told = publish(socket, *stream, *progress, put);
    }
  }
  return told == 1 ? tell(socket, *stream) : told;
}

int twinpool_kv_verify(int socket, RowStream* stream, uint64_t* sent_checksums, Progress* progress, uint32_t put) {
  size_t seen = 0;
  while (stream->hashed < all_rows(*stream)) {
    seen = std::max(seen, in_place(*stream, *progress, put));
    if (seen > stream->hashed) {
      hash_up_to(*stream, seen);
      continue;
    }
    if (stream->looks < kLooksInVain) {
      if (look_for_more(*stream, *progress, put, seen)) continue;
      ++stream->looks;
    }
    progress->sleeps.store(1);
    seen = std::max(seen, in_place(*stream, *progress, put));
    const ssize_t received = seen > stream->hashed ? 1 : take(socket, *stream, sent_checksums);
    progress->sleeps.store(0);
    if (received <= 0) return static_cast<int>(received);
  }
  while (stream->moved < sizeof(uint64_t) * stream->num_rows) {
    if (stream->looks < kLooksInVain && !look(socket, POLLIN, kLookNs)) ++stream->looks;
    const ssize_t received = take(socket, *stream, sent_checksums);
    if (received <= 0) return static_cast<int>(received);
  }
  return 1;
}
