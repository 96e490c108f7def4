#include "stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "look.h"
#include "xxh3.h"

using namespace twinpool;

namespace {

// Bytes between the hash and the socket. Sending: so many that the receiver does not run dry meanwhile, so few that
// they are still in the cache. Receiving: what is hashed at once, in the core's own cache.
constexpr size_t kSendBytes = 1 << 20;
constexpr size_t kFirstBytes = 256 << 10;  // and doubled from there: the receiver waits for the first of them
constexpr size_t kReceiveBytes = 256 << 10;

constexpr size_t kPieces = 64;  // of one system call

// The pieces of header, rows and trailer that hold bytes `begin` to `end` - 1 of the message, or the first of them.
size_t pieces(const RowStream& stream, void* trailer, size_t begin, size_t end, iovec* out) {
  const size_t rows_end = stream.head_bytes + all_rows(stream);
  size_t n = 0;
  while (begin < end && n < kPieces) {
    uint8_t* from;
    size_t size;
    if (begin < stream.head_bytes) {
      from = const_cast<uint8_t*>(stream.head) + begin;
      size = stream.head_bytes - begin;
    } else if (begin < rows_end) {
      const size_t at = (begin - stream.head_bytes) % stream.row_bytes;
      from = stream.rows[(begin - stream.head_bytes) / stream.row_bytes] + at;
      size = stream.row_bytes - at;
    } else {
      from = static_cast<uint8_t*>(trailer) + (begin - rows_end);
      size = end - begin;
    }
    size = std::min(size, end - begin);
    out[n++] = {from, size};
    begin += size;
  }
  return n;
}

}  // namespace

void twinpool::hash_up_to(RowStream& stream, size_t num_bytes) {
  const size_t blocks = whole_blocks(stream.row_bytes);
  Sums sums;
  if (stream.hashed % stream.row_bytes) std::memcpy(sums.lane, stream.lanes, sizeof sums.lane);
  while (stream.hashed < num_bytes) {
    const size_t index = stream.hashed / stream.row_bytes, at = stream.hashed % stream.row_bytes;
    const uint8_t* row = stream.rows[index];
    const size_t left = blocks - at / kBlockBytes;
    if (left) {
      const size_t n = std::min(left, (num_bytes - stream.hashed) / kBlockBytes);
      if (!n) break;
      hash_blocks(sums, row + at, n);
      stream.hashed += n * kBlockBytes;
    } else {
      if (num_bytes - stream.hashed < stream.row_bytes - at) break;
      stream.checksums[index] = finish(sums, row, stream.row_bytes);
      stream.hashed += stream.row_bytes - at;
      sums = Sums();
    }
  }
  std::memcpy(stream.lanes, sums.lane, sizeof sums.lane);
}

int twinpool_kv_send(int socket, RowStream* stream) {
  const size_t rows = all_rows(*stream), total = stream->head_bytes + rows + 8 * stream->num_rows;
  while (stream->moved < total) {
    const size_t gone = stream->moved > stream->head_bytes ? stream->moved - stream->head_bytes : 0;
    const size_t ahead = std::min(kSendBytes, std::max(kFirstBytes, gone));
    if (stream->hashed < rows && stream->hashed < gone + ahead / 2) {
      hash_up_to(*stream, std::min(rows, gone + ahead));
    }
    const size_t end = stream->hashed < rows ? stream->head_bytes + stream->hashed : total;
    iovec vector[kPieces];
    msghdr message{};
    message.msg_iov = vector;
    message.msg_iovlen = pieces(*stream, stream->checksums, stream->moved, end, vector);
    const ssize_t sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
      if (stream->looks < kLooksInVain) {
        if (look(socket, POLLOUT, kLookNs)) continue;
        ++stream->looks;
      }
      return 0;
    }
    stream->moved += static_cast<size_t>(sent);
  }
  return 1;
}

int twinpool_kv_receive(int socket, RowStream* stream, uint64_t* sent_checksums) {
  const size_t rows = all_rows(*stream), total = rows + 8 * stream->num_rows;
  while (stream->moved < total) {
    iovec vector[kPieces];
    msghdr message{};
    message.msg_iov = vector;
    message.msg_iovlen =
        pieces(*stream, sent_checksums, stream->moved, std::min(total, stream->moved + kReceiveBytes), vector);
    if (stream->looks < kLooksInVain && !look(socket, POLLIN, kLookNs)) ++stream->looks;
    const ssize_t received = recvmsg(socket, &message, 0);
    if (received < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    if (received == 0) return 0;
    stream->moved += static_cast<size_t>(received);
    hash_up_to(*stream, std::min(rows, stream->moved));
  }
  return 1;
}
