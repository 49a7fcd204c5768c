//! The CRIU messages that rekindle uses: rpc.proto and the image records that we read (CRIU 4.2, `images/*.proto`).
//! Field numbers are CRIU's; names are CRIU's if a reader of its documentation would look for them.

use prost::Message;

/// `criu_req_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Kind {
    Empty = 0,
    Dump = 1,
    Restore = 2,
    Notify = 6,
    FeatureCheck = 9,
    Version = 10,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Request {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub options: Option<Options>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) notify_success: Option<bool>,
    /// CRIU accepts another request after this one; supported for few kinds of requests.
    #[prost(bool, optional, tag = "4")]
    pub(crate) keep_open: Option<bool>,
    #[prost(message, optional, tag = "5")]
    pub features: Option<Features>,
}

/// `inherit_fd`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct InheritFd {
    /// The path in the image, without the leading slash.
    #[prost(bytes = "vec", required, tag = "1")]
    pub key: Vec<u8>,
    /// The descriptor number in CRIU.
    #[prost(int32, required, tag = "2")]
    pub fd: i32,
}

/// `criu_opts`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Options {
    /// -1: `images_dir` names the folder instead. CRIU would look the descriptor up in our /proc, which is impossible
    /// from another PID namespace.
    #[prost(int32, required, tag = "1", default = "-1")]
    pub(crate) images_dir_fd: i32,
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) leave_running: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub(crate) ext_unix_sk: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub(crate) tcp_established: Option<bool>,
    #[prost(bool, optional, tag = "8")]
    pub(crate) file_locks: Option<bool>,
    #[prost(int32, optional, tag = "9")]
    pub(crate) log_level: Option<i32>,
    #[prost(bool, optional, tag = "12")]
    pub(crate) notify_scripts: Option<bool>,
    #[prost(bool, optional, tag = "18")]
    pub link_remap: Option<bool>,
    #[prost(bool, optional, tag = "26")]
    pub(crate) rst_sibling: Option<bool>,
    #[prost(message, repeated, tag = "27")]
    pub(crate) inherit_fd: Vec<InheritFd>,
    /// `CriuCgMode`; 0 is IGNORE.
    #[prost(int32, optional, tag = "34")]
    pub(crate) manage_cgroups_mode: Option<i32>,
    #[prost(uint32, optional, tag = "35")]
    pub ghost_limit: Option<u32>,
    /// Seconds, for freezing only.
    #[prost(uint32, optional, tag = "45")]
    pub timeout: Option<u32>,
    #[prost(bool, optional, tag = "46")]
    pub(crate) tcp_skip_in_flight: Option<bool>,
    #[prost(bool, optional, tag = "52")]
    pub(crate) tcp_close: Option<bool>,
    /// 3 is SKIP: the tasks are frozen anyway, and the alternatives need iptables or nftables.
    #[prost(int32, optional, tag = "64")]
    pub(crate) network_lock: Option<i32>,
    /// Permission bits of files are not compared with the image's.
    #[prost(bool, optional, tag = "66")]
    pub(crate) skip_file_rwx_check: Option<bool>,
    #[prost(string, optional, tag = "68")]
    pub images_dir: Option<String>,
    #[prost(bool, optional, tag = "71")]
    pub(crate) log_to_stderr: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Features {
    #[prost(bool, optional, tag = "1")]
    pub(crate) mem_track: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) pidfd_store: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Response {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub kind: i32,
    #[prost(bool, required, tag = "2")]
    pub success: bool,
    #[prost(message, optional, tag = "4")]
    pub restore: Option<RestoreResponse>,
    #[prost(message, optional, tag = "5")]
    pub notify: Option<Notify>,
    #[prost(int32, optional, tag = "7")]
    pub(crate) cr_errno: Option<i32>,
    #[prost(message, optional, tag = "8")]
    pub features: Option<Features>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct RestoreResponse {
    /// The root's pid in CRIU's PID namespace.
    #[prost(int32, required, tag = "1")]
    pub pid: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Notify {
    #[prost(string, optional, tag = "1")]
    pub script: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
}

/// `pstree_entry`, one per process.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PstreeEntry {
    #[prost(uint32, required, tag = "1")]
    pub pid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) ppid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) pgid: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) sid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// `pagemap_head`, the first record of a page map.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct PagemapHead {
    #[prost(uint32, required, tag = "1")]
    pub pages_id: u32,
}

/// `pagemap_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct PagemapEntry {
    /// The address of the first page.
    #[prost(uint64, required, tag = "1")]
    pub vaddr: u64,
    /// The number of pages up to CRIU 4.1.
    #[prost(uint32, optional, tag = "2")]
    pub(crate) compat_nr_pages: Option<u32>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) in_parent: Option<bool>,
    /// 1 parent, 2 lazy, 4 present.
    #[prost(uint32, optional, tag = "4")]
    pub flags: Option<u32>,
    /// The number of pages since CRIU 4.2.
    #[prost(uint64, optional, tag = "5")]
    pub nr_pages: Option<u64>,
}

/// `file_entry` of files.img; only regular files and sockets are read.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct FileEntry {
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "3")]
    pub reg: Option<RegFileEntry>,
    #[prost(message, optional, tag = "4")]
    pub inet: Option<InetSocketEntry>,
    #[prost(message, optional, tag = "16")]
    pub unix: Option<UnixSocketEntry>,
}

/// The used fields of `unix_sk_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct UnixSocketEntry {
    /// The address it is bound to: a path, perhaps followed by zeros; or zero and a name; or nothing.
    #[prost(bytes = "vec", required, tag = "11")]
    pub name: Vec<u8>,
}

/// `file_entry` of a UNIX socket that may listen.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ListenerFileEntry {
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "16")]
    pub unix: Option<ListenerEntry>,
}

/// The used fields of `unix_sk_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ListenerEntry {
    /// As of TCP, in the kernel's `tcp_states.h`.
    #[prost(uint32, required, tag = "4")]
    pub state: u32,
    #[prost(uint32, required, tag = "7")]
    pub backlog: u32,
}

/// The used fields of `inet_sk_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct InetSocketEntry {
    #[prost(uint32, required, tag = "2")]
    pub inode: u32,
    /// `IPPROTO_TCP`, `IPPROTO_UDP`.
    #[prost(uint32, required, tag = "5")]
    pub protocol: u32,
    /// TCP state, as in the kernel's `tcp_states.h`.
    #[prost(uint32, required, tag = "6")]
    pub state: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) source_port: u32,
    /// 0 if it is not connected.
    #[prost(uint32, required, tag = "8")]
    pub(crate) destination_port: u32,
    /// One word or four, in network byte order.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub source: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub destination: Vec<u32>,
    /// `sk_shutdown`: 1 if it was shut down for reading, 2 for writing, 3 for both.
    #[prost(uint32, optional, tag = "19")]
    pub shutdown: Option<u32>,
}

/// The used fields of `tcp_stream_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct TcpStreamEntry {
    /// Bytes received and not read.
    #[prost(uint32, required, tag = "1")]
    pub(crate) inq_len: u32,
    /// The number of the next byte to be received.
    #[prost(uint32, required, tag = "2")]
    pub(crate) inq_seq: u32,
    /// Bytes written and not acknowledged.
    #[prost(uint32, required, tag = "3")]
    pub(crate) outq_len: u32,
    /// The number of the next byte to be written.
    #[prost(uint32, required, tag = "4")]
    pub(crate) outq_seq: u32,
    /// Bytes at the end of those that were written and not acknowledged that were not even sent.
    #[prost(uint32, optional, tag = "12")]
    pub(crate) unsq_len: Option<u32>,
    /// The number of the byte after those that were acknowledged.
    #[prost(uint32, optional, tag = "17")]
    pub(crate) rcv_wup: Option<u32>,
}

/// `reg_file_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RegFileEntry {
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// Flags of open(2).
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    #[prost(uint64, required, tag = "3")]
    pub pos: u64,
    /// Without the leading slash if it is in the task's root. CRIU writes any bytes into a field of type string: names of
    /// files need not be UTF-8.
    #[prost(bytes = "vec", required, tag = "6")]
    pub name: Vec<u8>,
    /// Size of a regular file, unless it was opened only for appending: a restore compares it.
    #[prost(uint64, optional, tag = "8")]
    pub size: Option<u64>,
    /// Another component restores it.
    #[prost(bool, optional, tag = "9")]
    pub ext: Option<bool>,
    /// `st_mode`: a restore compares it.
    #[prost(uint32, optional, tag = "10")]
    pub mode: Option<u32>,
    /// The build-id of an ELF file, padded to whole words: a restore compares it.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub build_id: Vec<u32>,
}

/// `file_entry` of a file that a plugin accepted, and of its replacement.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PluginFileEntry {
    /// `fd_types`.
    #[prost(uint32, required, tag = "1")]
    pub kind: u32,
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "3")]
    pub reg: Option<NullFileEntry>,
    #[prost(message, optional, tag = "15")]
    pub ext: Option<ExtFileEntry>,
}

/// `reg_file_entry` of a device, with which a restore compares nothing.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct NullFileEntry {
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    #[prost(uint64, required, tag = "3")]
    pub pos: u64,
    /// `fown_entry`, unchanged.
    #[prost(bytes = "vec", required, tag = "5")]
    pub owner: Vec<u8>,
    /// Any bytes: the entry is also read of files that keep their name.
    #[prost(bytes = "vec", required, tag = "6")]
    pub name: Vec<u8>,
}

/// `file_entry` of an eventfd, and of the file in whose place a restore gets one that we make.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct EventfdFileEntry {
    /// `fd_types`.
    #[prost(uint32, required, tag = "1")]
    pub kind: u32,
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "3")]
    pub reg: Option<NullFileEntry>,
    #[prost(message, optional, tag = "8")]
    pub eventfd: Option<EventfdEntry>,
}

/// `eventfd_file_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct EventfdEntry {
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    /// `fown_entry`, unchanged.
    #[prost(bytes = "vec", required, tag = "3")]
    pub owner: Vec<u8>,
    #[prost(uint64, required, tag = "4")]
    pub count: u64,
}

/// `timerfd_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TimerfdEntry {
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    /// `fown_entry`, unchanged.
    #[prost(bytes = "vec", required, tag = "3")]
    pub owner: Vec<u8>,
    #[prost(uint32, required, tag = "4")]
    pub clock: u32,
    /// Those that are not read yet.
    #[prost(uint64, required, tag = "5")]
    pub ticks: u64,
    #[prost(uint32, required, tag = "6")]
    pub set_flags: u32,
    /// The time until the next one.
    #[prost(uint64, required, tag = "7")]
    pub value_s: u64,
    #[prost(uint64, required, tag = "8")]
    pub value_ns: u64,
    #[prost(uint64, required, tag = "9")]
    pub interval_s: u64,
    #[prost(uint64, required, tag = "10")]
    pub interval_ns: u64,
}

/// `ext_file_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExtFileEntry {
    /// `fown_entry`, unchanged.
    #[prost(bytes = "vec", required, tag = "5")]
    pub owner: Vec<u8>,
}

/// The fields of `file_entry` used for files in the queue of a socket.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct QueuedFileEntry {
    /// `fd_types`.
    #[prost(uint32, required, tag = "1")]
    pub kind: u32,
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "16")]
    pub unix: Option<ConnectedEntry>,
}

/// The used fields of `unix_sk_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ConnectedEntry {
    /// Its inode.
    #[prost(uint32, required, tag = "2")]
    pub ino: u32,
    /// `SOCK_STREAM` and others.
    #[prost(uint32, required, tag = "3")]
    pub kind: u32,
    /// `USK_CALLBACK` and others of criu/sk-unix.c.
    #[prost(uint32, required, tag = "6")]
    pub marks: u32,
    /// The inode of the socket that it is connected to; 0 if it is not connected.
    #[prost(uint32, required, tag = "8")]
    pub peer: u32,
}

/// `file_entry` of a UNIX socket for datagrams.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DatagramFileEntry {
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    #[prost(message, optional, tag = "16")]
    pub unix: Option<DatagramEntry>,
}

/// The used fields of `unix_sk_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DatagramEntry {
    /// Its inode.
    #[prost(uint32, required, tag = "2")]
    pub ino: u32,
    /// `SOCK_DGRAM` and others.
    #[prost(uint32, required, tag = "3")]
    pub kind: u32,
    /// The inode of the socket that it is connected to; 0 if it is not connected.
    #[prost(uint32, required, tag = "8")]
    pub peer: u32,
    /// As in [`UnixSocketEntry`].
    #[prost(bytes = "vec", required, tag = "11")]
    pub name: Vec<u8>,
    /// The file that it was bound to is gone.
    #[prost(bool, optional, tag = "15")]
    pub deleted: Option<bool>,
}

/// `sk_packet_entry`: a packet in the queue of a socket; its data follows the record.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PacketEntry {
    /// The file id of the socket.
    #[prost(uint32, required, tag = "1")]
    pub(crate) id_for: u32,
    /// Bytes of data.
    #[prost(uint32, required, tag = "2")]
    pub length: u32,
    #[prost(message, repeated, tag = "4")]
    pub(crate) scm: Vec<ScmEntry>,
}

/// `scm_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ScmEntry {
    /// `SCM_RIGHTS`: the only kind that CRIU writes.
    #[prost(uint32, required, tag = "1")]
    pub kind: u32,
    /// File ids.
    #[prost(uint32, repeated, packed = "false", tag = "2")]
    pub rights: Vec<u32>,
}

/// `fdinfo_entry`: a descriptor.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FdinfoEntry {
    /// The file id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// `fd_types`.
    #[prost(uint32, required, tag = "3")]
    pub kind: u32,
    /// The descriptor number.
    #[prost(uint32, required, tag = "4")]
    pub fd: u32,
}

/// The used fields of `task_kobj_ids_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct KobjIds {
    /// The id of the descriptor table.
    #[prost(uint32, required, tag = "2")]
    pub files: u32,
}

/// The used fields of `core_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct CoreEntry {
    /// Of the first thread of a process only.
    #[prost(message, optional, tag = "3")]
    pub(crate) task: Option<TaskCoreEntry>,
    #[prost(message, optional, tag = "5")]
    pub(crate) thread: Option<ThreadCoreEntry>,
}

/// The used fields of `task_core_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct TaskCoreEntry {
    #[prost(uint32, required, tag = "1")]
    pub(crate) state: u32,
}

/// The used fields of `thread_core_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ThreadCoreEntry {
    /// `SCHED_*`
    #[prost(uint32, optional, tag = "4")]
    pub(crate) policy: Option<u32>,
    #[prost(message, optional, tag = "10")]
    pub(crate) credentials: Option<CredsEntry>,
}

/// The used fields of `creds_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct CredsEntry {
    #[prost(uint32, required, tag = "13")]
    pub(crate) securebits: u32,
}

/// `posix_timer_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct PosixTimerEntry {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    /// Negative ones are those of CPU time.
    #[prost(uint32, required, tag = "2")]
    pub(crate) clock: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) signal: u32,
    /// `SIGEV_*`
    #[prost(uint32, required, tag = "4")]
    pub(crate) notify: u32,
    #[prost(uint64, required, tag = "5")]
    pub(crate) value: u64,
    #[prost(uint32, required, tag = "6")]
    pub(crate) overrun: u32,
    #[prost(uint64, required, tag = "7")]
    pub(crate) interval_s: u64,
    #[prost(uint64, required, tag = "8")]
    pub(crate) interval_ns: u64,
    /// The time until it fires.
    #[prost(uint64, required, tag = "9")]
    pub(crate) value_s: u64,
    #[prost(uint64, required, tag = "10")]
    pub(crate) value_ns: u64,
    /// The thread or process that gets the signal.
    #[prost(int32, optional, tag = "11")]
    pub(crate) thread: Option<i32>,
}

/// A message none of whose fields is read.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct RawMessage {}

/// `file_lock_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FileLockEntry {
    /// The kind of lock.
    #[prost(uint32, required, tag = "1")]
    pub flag: u32,
    /// Read or write.
    #[prost(uint32, required, tag = "2")]
    pub kind: u32,
    #[prost(int32, required, tag = "3")]
    pub pid: i32,
    #[prost(int32, required, tag = "4")]
    pub fd: i32,
    #[prost(int64, required, tag = "5")]
    pub start: i64,
    #[prost(int64, required, tag = "6")]
    pub length: i64,
}

/// The used fields of `mm_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct MmEntry {
    /// The id of the file that is its program.
    #[prost(uint32, required, tag = "12")]
    pub(crate) exe_file_id: u32,
    #[prost(message, repeated, tag = "14")]
    pub(crate) vmas: Vec<VmaEntry>,
}

/// The used fields of `fs_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FsEntry {
    /// The id of the file that is its working directory.
    #[prost(uint32, required, tag = "1")]
    pub(crate) cwd_id: u32,
}

/// `vma_entry`: a mapping.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct VmaEntry {
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
    #[prost(uint64, required, tag = "3")]
    pub(crate) pgoff: u64,
    /// The id of a file or of shared memory.
    #[prost(uint64, required, tag = "4")]
    pub(crate) shmid: u64,
    #[prost(uint32, required, tag = "5")]
    pub prot: u32,
    /// Flags of mmap(2).
    #[prost(uint32, required, tag = "6")]
    pub flags: u32,
    #[prost(uint32, required, tag = "7")]
    pub status: u32,
    /// -1: not used in images.
    #[prost(sint64, required, tag = "8")]
    pub fd: i64,
    #[prost(uint64, optional, tag = "9")]
    pub(crate) madv: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub(crate) fdflags: Option<u32>,
}

/// `memfd_inode_entry`, what is read of it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemfdEntry {
    /// Any bytes, as the name of a file.
    #[prost(bytes = "vec", required, tag = "1")]
    pub name: Vec<u8>,
}

/// `remap_file_path_entry`: a file that was deleted at the time of the dump.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct RemapEntry {
    #[prost(uint32, required, tag = "1")]
    pub(crate) orig_id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) remap_id: u32,
    /// 0 linked, 1 ghost, 2 a dead process's /proc entry.
    #[prost(uint32, optional, tag = "3")]
    pub(crate) remap_type: Option<u32>,
}

impl RemapEntry {
    /// Whether the file has another name, and CRIU made a temporary one.
    pub(crate) fn is_link(&self) -> bool {
        self.remap_type.unwrap_or(0) == 0
    }

    /// Whether the file has no name any more, and the image has its content.
    pub(crate) fn is_ghost(&self) -> bool {
        self.remap_type == Some(1)
    }
}

/// `stats_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct StatsEntry {
    #[prost(message, optional, tag = "1")]
    pub dump: Option<DumpStats>,
}

/// `dump_stats_entry`; times in microseconds.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct DumpStats {
    #[prost(uint32, required, tag = "1")]
    pub(crate) freezing_time: u32,
    #[prost(uint32, required, tag = "2")]
    pub frozen_time: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) memdump_time: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) memwrite_time: u32,
}
