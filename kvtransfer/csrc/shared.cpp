#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "look.h"
#include "stream.h"
#include "xxh3.h"

using namespace twinpool;

namespace {

// Rows are told of together up to this many bytes: the receiver then hashes them while the next are copied.
constexpr size_t kToldBytes = 256 << 10;

// How long the next row may take to be copied, on a slow machine.
int64_t row_ns(const RowStream& stream) { return kLookNs + static_cast<int64_t>(std::min<size_t>(stream.row_bytes, 1 << 20)) / 2; }

size_t checksum_bytes(const RowStream& stream) { return sizeof(uint64_t) * stream.num_rows; }

void copy_row(RowStream& stream, uint8_t* to) {
  const size_t blocks = whole_blocks(stream.row_bytes), copied = blocks * kBlockBytes, index = stream.hashed++;
  const uint8_t* from = stream.rows[index];
  Sums sums;
  copy_blocks(sums, to, from, blocks, true);
  std::memcpy(to + copied, from + copied, stream.row_bytes - copied);
  stream.checksums[index] = finish(sums, from, stream.row_bytes);
}

// Sends what is there of header and checksums: 1, or 0 when there is no more room, or -errno.
int tell(int socket, RowStream& stream) {
  const size_t end = stream.head_bytes + sizeof(uint64_t) * stream.hashed;
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

}  // namespace

int twinpool_kv_write(int socket, RowStream* stream, uint8_t* const* there) {
  int told = tell(socket, *stream);  // the receiver wakes up while the first rows are copied
  while (told == 1 && stream->hashed < stream->num_rows) {
    size_t copied = 0;
    while (copied < kToldBytes && stream->hashed < stream->num_rows) {
      copy_row(*stream, there[stream->hashed]);
      copied += stream->row_bytes;
    }
    fence_copies();
    told = tell(socket, *stream);
  }
  return told;
}

int twinpool_kv_verify(int socket, RowStream* stream, uint64_t* sent_checksums) {
  const size_t total = checksum_bytes(*stream);
  while (stream->hashed < stream->num_rows) {
    if (stream->moved < sizeof(uint64_t) * (stream->hashed + 1)) {
      if (stream->looks < kLooksInVain && !look(socket, POLLIN, row_ns(*stream))) ++stream->looks;
      const ssize_t received = recv(socket, reinterpret_cast<uint8_t*>(sent_checksums) + stream->moved, total - stream->moved, 0);
      if (received < 0) {
        if (errno == EINTR) continue;
        return -errno;
      }
      if (received == 0) return 0;
      stream->moved += static_cast<size_t>(received);
      continue;
    }
    const size_t index = stream->hashed++;
    Sums sums;
    hash_blocks(sums, stream->rows[index], whole_blocks(stream->row_bytes));
    stream->checksums[index] = finish(sums, stream->rows[index], stream->row_bytes);
  }
  return 1;
}
