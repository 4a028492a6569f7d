// A file system for tests, in user space: every request of the kernel is done below another directory.
//
//     fuse_passthrough SOURCE MOUNT_POINT [latency-us=N] [cache=through|back|none] [direct=yes|no]
//                      [locks=kernel|server|no] [rename2=yes|no] [fallocate=yes|no]
//
// It speaks the kernel's protocol (linux/fuse.h) over /dev/fuse and mounts by itself, so it needs root and no library.
// It prints a line when the file system is mounted. It unmounts and ends when its standard input ends (with whoever
// started it, however that died), and after kLifetimeS in any case: until then, a process that waits for an answer
// cannot even be killed. It exits with 77 where there is no such file system, and says why.
//
//   latency-us  each request is answered so much later; up to 16 at once
//   cache       through: writes go through the page cache and on; back: they stay there; none: there is no page cache
//               (FOPEN_DIRECT_IO)
//   direct=no   O_DIRECT is refused with EINVAL, at the opening or at the first request
//   locks       kernel: of this host, and the server is not asked; server: the server is asked, as on a cluster;
//               no: it is asked and answers ENOSYS
//   rename2=no  a rename with flags is refused with EINVAL
//   fallocate=no  is refused with EOPNOTSUPP
//
// Source: linux/Documentation/filesystems/fuse/fuse.rst, include/uapi/linux/fuse.h.
#if !__has_include(<linux/fuse.h>)
#include <cstdio>
int main() {
  std::fputs("linux/fuse.h is not installed\n", stderr);
  return 77;
}
#else

#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kLifetimeS = 300;
constexpr int kThreadCount = 16;
constexpr uint32_t kWriteBytesMax = 1 << 20;
constexpr size_t kBufferBytes = kWriteBytesMax + (64 << 10);
constexpr uint64_t kCachedS = 1;  // how long the kernel may believe names and attributes

struct Options {
  std::chrono::microseconds latency{0};
  std::string cache = "through";
  std::string locks = "kernel";
  bool direct = true;
  bool rename2 = true;
  bool fallocate = true;
};

// What the kernel knows by a number, which is its address. An O_PATH descriptor follows it through renames.
struct Node {
  int fd;
  std::pair<dev_t, ino_t> identity;
  uint64_t lookup_count;
  std::map<uint64_t, int> lock_fds;  // by owner: a description of its own, which holds the owner's locks
};

struct OpenFile {
  int fd;
  std::set<uint64_t> lock_owners;
};

class Server {
 public:
  Server(int device, int root_fd, Options options) : device_(device), options_(std::move(options)) {
    struct stat status = {};
    if (fstat(root_fd, &status) != 0) std::abort();
    root_ = Node{.fd = root_fd, .identity = {status.st_dev, status.st_ino}, .lookup_count = 1, .lock_fds = {}};
    nodes_[root_.identity] = &root_;
  }

  // Answer requests until the file system is unmounted.
  void Run() {
    const std::unique_ptr<char[]> buffer(new char[kBufferBytes]);
    while (true) {
      const ssize_t size_bytes = read(device_, buffer.get(), kBufferBytes);
      if (size_bytes < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
      if (size_bytes < 0) return;
      fuse_in_header header;
      std::memcpy(&header, buffer.get(), sizeof(header));
      Dispatch(header, buffer.get() + sizeof(header));
    }
  }

 private:
  // ------------------------------------------------------------------------------------------- answers

  void Answer(const fuse_in_header& request, int sys_errno, const void* data = nullptr, size_t size_bytes = 0) const {
    fuse_out_header header{
        .len = static_cast<uint32_t>(sizeof(header) + size_bytes), .error = -sys_errno, .unique = request.unique};
    const std::array<iovec, 2> parts{{{.iov_base = &header, .iov_len = sizeof(header)},
                                      {.iov_base = const_cast<void*>(data), .iov_len = size_bytes}}};
    // ENOENT: the request was interrupted meanwhile. ENODEV: the file system is gone.
    (void)!writev(device_, parts.data(), size_bytes > 0 ? 2 : 1);
  }

  template <typename Body>
  void AnswerWith(const fuse_in_header& request, const Body& body) const {
    Answer(request, 0, &body, sizeof(body));
  }

  // `result` of a system call: its errno, or no error.
  void AnswerResult(const fuse_in_header& request, int result) const { Answer(request, result == 0 ? 0 : errno); }

  // ------------------------------------------------------------------------------------------- nodes

  Node& NodeOf(uint64_t id) { return id == FUSE_ROOT_ID ? root_ : *reinterpret_cast<Node*>(id); }
  static OpenFile& FileOf(uint64_t handle) { return *reinterpret_cast<OpenFile*>(handle); }
  static DIR* DirectoryOf(uint64_t handle) { return reinterpret_cast<DIR*>(handle); }
  static std::string PathOf(const Node& node) { return "/proc/self/fd/" + std::to_string(node.fd); }

  static fuse_attr AttributesOf(const struct stat& status) {
    return {.ino = status.st_ino,
            .size = static_cast<uint64_t>(status.st_size),
            .blocks = static_cast<uint64_t>(status.st_blocks),
            .atime = static_cast<uint64_t>(status.st_atim.tv_sec),
            .mtime = static_cast<uint64_t>(status.st_mtim.tv_sec),
            .ctime = static_cast<uint64_t>(status.st_ctim.tv_sec),
            .atimensec = static_cast<uint32_t>(status.st_atim.tv_nsec),
            .mtimensec = static_cast<uint32_t>(status.st_mtim.tv_nsec),
            .ctimensec = static_cast<uint32_t>(status.st_ctim.tv_nsec),
            .mode = status.st_mode,
            .nlink = static_cast<uint32_t>(status.st_nlink),
            .uid = status.st_uid,
            .gid = status.st_gid,
            .rdev = static_cast<uint32_t>(status.st_rdev),
            .blksize = static_cast<uint32_t>(status.st_blksize),
            .flags = 0};
  }

  // Find an entry and count that the kernel knows it. Returns an errno.
  int LookUp(const Node& parent, const char* name, fuse_entry_out& entry) {
    const int fd = openat(parent.fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    struct stat status = {};
    if (fstat(fd, &status) != 0) {
      close(fd);
      return EIO;
    }
    const std::lock_guard guard(mutex_);
    Node*& node = nodes_[{status.st_dev, status.st_ino}];
    if (node != nullptr) {
      close(fd);
      ++node->lookup_count;
    } else {
      node = new Node{.fd = fd, .identity = {status.st_dev, status.st_ino}, .lookup_count = 1, .lock_fds = {}};
    }
    entry = {};
    entry.nodeid = node == &root_ ? FUSE_ROOT_ID : reinterpret_cast<uint64_t>(node);
    entry.entry_valid = entry.attr_valid = kCachedS;
    entry.attr = AttributesOf(status);
    return 0;
  }

  void AnswerEntry(const fuse_in_header& request, const char* name) {
    fuse_entry_out entry;
    const int sys_errno = LookUp(NodeOf(request.nodeid), name, entry);
    if (sys_errno != 0) return Answer(request, sys_errno);
    AnswerWith(request, entry);
  }

  void Forget(uint64_t id, uint64_t count) {
    if (id == FUSE_ROOT_ID) return;
    const std::lock_guard guard(mutex_);
    Node& node = NodeOf(id);
    if ((node.lookup_count -= count) > 0) return;
    nodes_.erase(node.identity);
    for (const auto& [owner, fd] : node.lock_fds) close(fd);
    close(node.fd);
    delete &node;
  }

  void AnswerAttributes(const fuse_in_header& request) {
    struct stat status = {};
    if (fstat(NodeOf(request.nodeid).fd, &status) != 0) return Answer(request, errno);
    fuse_attr_out answer{};
    answer.attr_valid = kCachedS;
    answer.attr = AttributesOf(status);
    AnswerWith(request, answer);
  }

  void SetAttributes(const fuse_in_header& request, const fuse_setattr_in& wanted) {
    const std::string path = PathOf(NodeOf(request.nodeid));
    const auto has = [&](uint32_t flag) { return (wanted.valid & flag) != 0; };
    int result = 0;
    if (has(FATTR_MODE)) result = chmod(path.c_str(), wanted.mode);
    if (result == 0 && has(FATTR_UID | FATTR_GID)) {
      result = chown(path.c_str(), has(FATTR_UID) ? wanted.uid : static_cast<uid_t>(-1),
                     has(FATTR_GID) ? wanted.gid : static_cast<gid_t>(-1));
    }
    if (result == 0 && has(FATTR_SIZE)) result = truncate(path.c_str(), static_cast<off_t>(wanted.size));
    if (result == 0 && has(FATTR_ATIME | FATTR_MTIME)) {
      const auto time = [&](uint32_t flag, uint32_t now_flag, uint64_t seconds, uint32_t nanoseconds) {
        if (!has(flag)) return timespec{.tv_sec = 0, .tv_nsec = UTIME_OMIT};
        if (has(now_flag)) return timespec{.tv_sec = 0, .tv_nsec = UTIME_NOW};
        return timespec{.tv_sec = static_cast<time_t>(seconds), .tv_nsec = nanoseconds};
      };
      const std::array<timespec, 2> times{time(FATTR_ATIME, FATTR_ATIME_NOW, wanted.atime, wanted.atimensec),
                                          time(FATTR_MTIME, FATTR_MTIME_NOW, wanted.mtime, wanted.mtimensec)};
      result = utimensat(AT_FDCWD, path.c_str(), times.data(), 0);
    }
    if (result != 0) return Answer(request, errno);
    AnswerAttributes(request);
  }

  // ------------------------------------------------------------------------------------------- files

  // The flags with which the server opens: its own requests go through the page cache, and the kernel does O_APPEND.
  // With a write-back cache the kernel also reads what it was asked to write.
  int FlagsFor(uint32_t wanted) const {
    int flags = static_cast<int>(wanted) & ~(O_DIRECT | O_APPEND | O_NOFOLLOW | O_EXCL | O_CREAT);
    if (options_.cache == "back" && (flags & O_ACCMODE) == O_WRONLY) flags = (flags & ~O_ACCMODE) | O_RDWR;
    return flags | O_CLOEXEC;
  }

  fuse_open_out Opened(int fd) const {
    fuse_open_out answer{};
    answer.fh = reinterpret_cast<uint64_t>(new OpenFile{.fd = fd, .lock_owners = {}});
    answer.open_flags = options_.cache == "none" ? FOPEN_DIRECT_IO : FOPEN_KEEP_CACHE;
    return answer;
  }

  bool Refuses(uint32_t flags) const { return !options_.direct && (flags & O_DIRECT) != 0; }

  void Open(const fuse_in_header& request, const fuse_open_in& wanted) {
    if (Refuses(wanted.flags)) return Answer(request, EINVAL);
    const int fd = open(PathOf(NodeOf(request.nodeid)).c_str(), FlagsFor(wanted.flags));
    if (fd < 0) return Answer(request, errno);
    AnswerWith(request, Opened(fd));
  }

  void Create(const fuse_in_header& request, const fuse_create_in& wanted, const char* name) {
    if (Refuses(wanted.flags)) return Answer(request, EINVAL);
    const Node& parent = NodeOf(request.nodeid);
    const int exclusive = static_cast<int>(wanted.flags) & O_EXCL;
    const int fd = openat(parent.fd, name, FlagsFor(wanted.flags) | O_CREAT | exclusive | O_NOFOLLOW, wanted.mode);
    if (fd < 0) return Answer(request, errno);
    struct {
      fuse_entry_out entry;
      fuse_open_out file;
    } answer;
    const int sys_errno = LookUp(parent, name, answer.entry);
    if (sys_errno != 0) {
      close(fd);
      return Answer(request, sys_errno);
    }
    answer.file = Opened(fd);
    AnswerWith(request, answer);
  }

  void Read(const fuse_in_header& request, const fuse_read_in& wanted, char* buffer) {
    if (Refuses(wanted.flags)) return Answer(request, EINVAL);
    const ssize_t done = pread(FileOf(wanted.fh).fd, buffer, std::min<size_t>(wanted.size, kBufferBytes),
                               static_cast<off_t>(wanted.offset));
    if (done < 0) return Answer(request, errno);
    Answer(request, 0, buffer, static_cast<size_t>(done));
  }

  void Write(const fuse_in_header& request, const fuse_write_in& wanted, const char* data) {
    if (Refuses(wanted.flags)) return Answer(request, EINVAL);
    const ssize_t done = pwrite(FileOf(wanted.fh).fd, data, wanted.size, static_cast<off_t>(wanted.offset));
    if (done < 0) return Answer(request, errno);
    AnswerWith(request, fuse_write_out{.size = static_cast<uint32_t>(done), .padding = 0});
  }

  void Release(const fuse_in_header& request, const fuse_release_in& wanted) {
    OpenFile& file = FileOf(wanted.fh);
    // Locks of an open file: its owner is the open file, which no flush names.
    for (const uint64_t owner : file.lock_owners) DropLocks(request.nodeid, owner);
    close(file.fd);
    delete &file;
    Answer(request, 0);
  }

  // ------------------------------------------------------------------------------------------- locks

  void DropLocks(uint64_t node_id, uint64_t owner) {
    const std::lock_guard guard(mutex_);
    Node& node = NodeOf(node_id);
    const auto found = node.lock_fds.find(owner);
    if (found == node.lock_fds.end()) return;
    close(found->second);
    node.lock_fds.erase(found);
  }

  void Lock(const fuse_in_header& request, const fuse_lk_in& wanted) {
    if (options_.locks == "no") return Answer(request, ENOSYS);
    if (request.opcode == FUSE_SETLKW || (wanted.lk_flags & FUSE_LK_FLOCK) != 0) return Answer(request, EOPNOTSUPP);
    const std::lock_guard guard(mutex_);
    Node& node = NodeOf(request.nodeid);
    if (!node.lock_fds.contains(wanted.owner)) {
      const int fd = open(PathOf(node).c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) return Answer(request, errno);
      node.lock_fds[wanted.owner] = fd;
    }
    FileOf(wanted.fh).lock_owners.insert(wanted.owner);
    constexpr uint64_t to_the_end = INT64_MAX;
    struct flock lock = {};
    lock.l_type = static_cast<short>(wanted.lk.type);
    lock.l_start = static_cast<off_t>(wanted.lk.start);
    lock.l_len = wanted.lk.end >= to_the_end ? 0 : static_cast<off_t>(wanted.lk.end - wanted.lk.start + 1);
    const int fd = node.lock_fds[wanted.owner];
    const bool asks = request.opcode == FUSE_GETLK;
    if (fcntl(fd, asks ? F_OFD_GETLK : F_OFD_SETLK, &lock) != 0) return Answer(request, errno);
    if (!asks) return Answer(request, 0);
    fuse_lk_out answer{};
    answer.lk.type = static_cast<uint32_t>(lock.l_type);
    answer.lk.start = static_cast<uint64_t>(lock.l_start);
    answer.lk.end = lock.l_len == 0 ? to_the_end : static_cast<uint64_t>(lock.l_start + lock.l_len - 1);
    AnswerWith(request, answer);  // whose it is, is not known: as from another host
  }

  // ------------------------------------------------------------------------------------------- directories

  void OpenDirectory(const fuse_in_header& request) {
    const int fd = open(PathOf(NodeOf(request.nodeid)).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* const directory = fd < 0 ? nullptr : fdopendir(fd);
    if (directory == nullptr) return Answer(request, errno);
    fuse_open_out answer{};
    answer.fh = reinterpret_cast<uint64_t>(directory);
    AnswerWith(request, answer);
  }

  void ReadDirectory(const fuse_in_header& request, const fuse_read_in& wanted, char* buffer) const {
    DIR* const directory = DirectoryOf(wanted.fh);
    if (wanted.offset == 0) {
      rewinddir(directory);
    } else {
      seekdir(directory, static_cast<long>(wanted.offset));
    }
    size_t done_bytes = 0;
    while (const dirent* const found = readdir(directory)) {
      const std::string_view name = found->d_name;
      const size_t entry_bytes = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + name.size());
      if (done_bytes + entry_bytes > std::min<size_t>(wanted.size, kBufferBytes)) break;
      fuse_dirent entry{};
      entry.ino = found->d_ino;
      entry.off = static_cast<uint64_t>(found->d_off);
      entry.namelen = static_cast<uint32_t>(name.size());
      entry.type = found->d_type;
      std::memset(buffer + done_bytes, 0, entry_bytes);
      std::memcpy(buffer + done_bytes, &entry, FUSE_NAME_OFFSET);
      std::memcpy(buffer + done_bytes + FUSE_NAME_OFFSET, name.data(), name.size());
      done_bytes += entry_bytes;
    }
    Answer(request, 0, buffer, done_bytes);
  }

  void Rename(const fuse_in_header& request, uint64_t new_parent, uint32_t flags, const char* name) {
    if (flags != 0 && !options_.rename2) return Answer(request, EINVAL);
    const char* const new_name = name + std::strlen(name) + 1;
    AnswerResult(request, renameat2(NodeOf(request.nodeid).fd, name, NodeOf(new_parent).fd, new_name,
                                    static_cast<unsigned>(flags)));
  }

  // ------------------------------------------------------------------------------------------- requests

  void Initialise(const fuse_in_header& request, const fuse_init_in& wanted) const {
    fuse_init_out answer{};
    answer.major = FUSE_KERNEL_VERSION;
    answer.minor = std::min<uint32_t>(FUSE_KERNEL_MINOR_VERSION, wanted.minor);
    answer.max_readahead = wanted.max_readahead;
    uint32_t flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS | FUSE_ATOMIC_O_TRUNC |
                     FUSE_MAX_PAGES;
    if (options_.locks != "kernel") flags |= FUSE_POSIX_LOCKS;
    if (options_.cache == "back") flags |= FUSE_WRITEBACK_CACHE;
    answer.flags = flags & wanted.flags;
    answer.max_background = kThreadCount;
    answer.congestion_threshold = kThreadCount;
    answer.max_write = kWriteBytesMax;
    answer.max_pages = kWriteBytesMax / 4096;
    answer.time_gran = 1;
    AnswerWith(request, answer);
  }

  void AnswerSpace(const fuse_in_header& request) {
    struct statvfs space = {};
    if (fstatvfs(root_.fd, &space) != 0) return Answer(request, errno);
    fuse_statfs_out answer{};
    answer.st.blocks = space.f_blocks;
    answer.st.bfree = space.f_bfree;
    answer.st.bavail = space.f_bavail;
    answer.st.files = space.f_files;
    answer.st.ffree = space.f_ffree;
    answer.st.bsize = static_cast<uint32_t>(space.f_bsize);
    answer.st.frsize = static_cast<uint32_t>(space.f_frsize);
    answer.st.namelen = static_cast<uint32_t>(space.f_namemax);
    AnswerWith(request, answer);
  }

  template <typename Body>
  static Body BodyOf(const char* body) {
    Body copy;
    std::memcpy(&copy, body, sizeof(copy));
    return copy;
  }

  void Dispatch(const fuse_in_header& request, char* body) {
    switch (request.opcode) {
      case FUSE_INIT:
        return Initialise(request, BodyOf<fuse_init_in>(body));
      case FUSE_FORGET:
        return Forget(request.nodeid, BodyOf<fuse_forget_in>(body).nlookup);
      case FUSE_BATCH_FORGET: {
        const auto count = BodyOf<fuse_batch_forget_in>(body).count;
        for (uint32_t i = 0; i < count; ++i) {
          const auto one = BodyOf<fuse_forget_one>(body + sizeof(fuse_batch_forget_in) + i * sizeof(fuse_forget_one));
          Forget(one.nodeid, one.nlookup);
        }
        return;
      }
      case FUSE_INTERRUPT:
        return;
      default:
        break;
    }
    if (options_.latency.count() > 0) std::this_thread::sleep_for(options_.latency);
    if (!DispatchFile(request, body)) DispatchName(request, body);
  }

  bool DispatchFile(const fuse_in_header& request, char* body) {
    switch (request.opcode) {
      case FUSE_OPEN:
        Open(request, BodyOf<fuse_open_in>(body));
        return true;
      case FUSE_READ:
        Read(request, BodyOf<fuse_read_in>(body), body);
        return true;
      case FUSE_WRITE:
        Write(request, BodyOf<fuse_write_in>(body), body + sizeof(fuse_write_in));
        return true;
      case FUSE_FSYNC: {
        const auto wanted = BodyOf<fuse_fsync_in>(body);
        const int fd = FileOf(wanted.fh).fd;
        AnswerResult(request, (wanted.fsync_flags & FUSE_FSYNC_FDATASYNC) != 0 ? fdatasync(fd) : fsync(fd));
        return true;
      }
      case FUSE_FALLOCATE: {
        const auto wanted = BodyOf<fuse_fallocate_in>(body);
        if (!options_.fallocate) {
          Answer(request, EOPNOTSUPP);
        } else {
          AnswerResult(request, fallocate(FileOf(wanted.fh).fd, static_cast<int>(wanted.mode),
                                          static_cast<off_t>(wanted.offset), static_cast<off_t>(wanted.length)));
        }
        return true;
      }
      case FUSE_FLUSH:  // at each close(): it drops the record locks of the process
        DropLocks(request.nodeid, BodyOf<fuse_flush_in>(body).lock_owner);
        Answer(request, 0);
        return true;
      case FUSE_RELEASE:
        Release(request, BodyOf<fuse_release_in>(body));
        return true;
      case FUSE_GETLK:
      case FUSE_SETLK:
      case FUSE_SETLKW:
        Lock(request, BodyOf<fuse_lk_in>(body));
        return true;
      default:
        return false;
    }
  }

  void DispatchName(const fuse_in_header& request, char* body) {
    switch (request.opcode) {
      case FUSE_LOOKUP:
        return AnswerEntry(request, body);
      case FUSE_GETATTR:
        return AnswerAttributes(request);
      case FUSE_SETATTR:
        return SetAttributes(request, BodyOf<fuse_setattr_in>(body));
      case FUSE_CREATE:
        return Create(request, BodyOf<fuse_create_in>(body), body + sizeof(fuse_create_in));
      case FUSE_MKDIR: {
        const char* const name = body + sizeof(fuse_mkdir_in);
        if (mkdirat(NodeOf(request.nodeid).fd, name, BodyOf<fuse_mkdir_in>(body).mode) != 0)
          return Answer(request, errno);
        return AnswerEntry(request, name);
      }
      case FUSE_LINK: {
        const char* const name = body + sizeof(fuse_link_in);
        const std::string source = PathOf(NodeOf(BodyOf<fuse_link_in>(body).oldnodeid));
        if (linkat(AT_FDCWD, source.c_str(), NodeOf(request.nodeid).fd, name, AT_SYMLINK_FOLLOW) != 0)
          return Answer(request, errno);
        return AnswerEntry(request, name);
      }
      case FUSE_SYMLINK: {
        const char* const target = body + std::strlen(body) + 1;
        if (symlinkat(target, NodeOf(request.nodeid).fd, body) != 0) return Answer(request, errno);
        return AnswerEntry(request, body);
      }
      case FUSE_READLINK: {
        const ssize_t size_bytes = readlinkat(NodeOf(request.nodeid).fd, "", body, kBufferBytes / 2);
        if (size_bytes < 0) return Answer(request, errno);
        return Answer(request, 0, body, static_cast<size_t>(size_bytes));
      }
      case FUSE_UNLINK:
        return AnswerResult(request, unlinkat(NodeOf(request.nodeid).fd, body, 0));
      case FUSE_RMDIR:
        return AnswerResult(request, unlinkat(NodeOf(request.nodeid).fd, body, AT_REMOVEDIR));
      case FUSE_RENAME:
        return Rename(request, BodyOf<fuse_rename_in>(body).newdir, 0, body + sizeof(fuse_rename_in));
      case FUSE_RENAME2: {
        const auto wanted = BodyOf<fuse_rename2_in>(body);
        return Rename(request, wanted.newdir, wanted.flags, body + sizeof(wanted));
      }
      case FUSE_OPENDIR:
        return OpenDirectory(request);
      case FUSE_READDIR:
        return ReadDirectory(request, BodyOf<fuse_read_in>(body), body);
      case FUSE_FSYNCDIR:
        return AnswerResult(request, fsync(dirfd(DirectoryOf(BodyOf<fuse_fsync_in>(body).fh))));
      case FUSE_RELEASEDIR:
        return AnswerResult(request, closedir(DirectoryOf(BodyOf<fuse_release_in>(body).fh)));
      case FUSE_STATFS:
        return AnswerSpace(request);
      default:
        return Answer(request, ENOSYS);
    }
  }

  const int device_;
  const Options options_;
  Node root_;
  std::mutex mutex_;  // of nodes_, and of the counts and locks of every node
  std::map<std::pair<dev_t, ino_t>, Node*> nodes_;
};

int CannotRun(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(errno));
  return 77;
}

bool Parse(std::string_view word, Options& options) {
  const size_t split = std::min(word.find('='), word.size());
  const std::string_view name = word.substr(0, split);
  const std::string value(word.substr(std::min(split + 1, word.size())));
  if (name == "latency-us") {
    options.latency = std::chrono::microseconds(std::atoi(value.c_str()));
  } else if (name == "cache") {
    options.cache = value;
  } else if (name == "locks") {
    options.locks = value;
  } else if (name == "direct") {
    options.direct = value == "yes";
  } else if (name == "rename2") {
    options.rename2 = value == "yes";
  } else if (name == "fallocate") {
    options.fallocate = value == "yes";
  } else {
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 3; i < argc; ++i) {
    if (!Parse(argv[i], options)) argc = 0;
  }
  if (argc < 3) {
    std::fputs("usage: fuse_passthrough SOURCE MOUNT_POINT [OPTION=VALUE ...]\n", stderr);
    return 2;
  }
  umask(0);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGINT, SIG_IGN);  // Ctrl-C is for the tests, which unmount then
  const int root_fd = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (root_fd < 0) return CannotRun(argv[1]);
  const int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (device < 0) return CannotRun("/dev/fuse");
  const std::string mount_options =
      "fd=" + std::to_string(device) + ",rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions";
  if (mount("passthrough", argv[2], "fuse", MS_NOSUID | MS_NODEV, mount_options.c_str()) != 0)
    return CannotRun("mounting of fuse");
  Server server(device, root_fd, options);
  for (int i = 0; i < kThreadCount; ++i) {
    std::thread([&server] {
      server.Run();
      _exit(0);
    }).detach();
  }
  std::puts("mounted");
  std::fflush(stdout);
  pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  poll(&input, 1, kLifetimeS * 1000);
  umount2(argv[2], MNT_DETACH);
  _exit(0);
}
#endif
