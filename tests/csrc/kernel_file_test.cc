// Small files of the kernel (core/kernel_file.h): whole, as a number, and none.
#include "core/kernel_file.h"

#include <unistd.h>

#include <cstdio>

#include "testing.h"

namespace fastpersist {
namespace {

std::string FileWith(const std::string& content) {
  const std::string path = std::string(g_directory) + "/kernel_file";
  std::FILE* const file = std::fopen(path.c_str(), "w");
  std::fwrite(content.data(), 1, content.size(), file);
  std::fclose(file);
  return path;
}

void ContentIsReadWhole() {
  for (const size_t size_bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{10'000}}) {
    const std::string content(size_bytes, 'x');
    EXPECT(ReadKernelFile(FileWith(content)) == content);
  }
  EXPECT(ReadKernelFile("/proc/self/mountinfo").find(" - ") != std::string::npos);
}

void NumbersEndWhereTheirDigitsEnd() {
  EXPECT(ReadKernelNumber(FileWith("512\n")) == 512);
  EXPECT(ReadKernelNumber(FileWith("-1\n")) == -1);
  EXPECT(ReadKernelNumber(FileWith("7")) == 7);
  EXPECT(!ReadKernelNumber(FileWith("")).has_value());
  EXPECT(!ReadKernelNumber(FileWith("none\n")).has_value());
  EXPECT(!ReadKernelNumber(FileWith("99999999999999999999\n")).has_value());
}

void MissingFilesSayNothing() {
  EXPECT(ReadKernelFile("/proc/no/such/file").empty());
  EXPECT(ReadKernelFile("/proc").empty());
  EXPECT(!ReadKernelNumber("/proc/no/such/file").has_value());
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv, {TEST(ContentIsReadWhole), TEST(NumbersEndWhereTheirDigitsEnd), TEST(MissingFilesSayNothing)});
}
