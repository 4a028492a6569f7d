#include "core/kernel_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <system_error>

namespace fastpersist {

std::string ReadKernelFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  std::string content;
  std::array<char, 4096> piece;
  for (ssize_t got = 1; got != 0;) {
    got = read(fd, piece.data(), piece.size());
    if (got < 0) {
      if (errno == EINTR) continue;
      content.clear();
      break;
    }
    content.append(piece.data(), static_cast<size_t>(got));
  }
  close(fd);
  return content;
}

std::optional<int64_t> ReadKernelNumber(const std::string& path) {
  const std::string content = ReadKernelFile(path);
  int64_t number = 0;
  const std::from_chars_result end = std::from_chars(content.data(), content.data() + content.size(), number);
  return end.ec == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace fastpersist
