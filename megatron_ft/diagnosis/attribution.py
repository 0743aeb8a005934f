"""Class of a failure by its first error: workload, hardware, network, storage, or a cascade. Pure.

A table of texts that CUDA, NCCL, gloo, torch and the operating system write. A text that isn't in the table has no
class: a wrong one would send someone to the wrong machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_ft.diagnosis.exceptions import is_peer_loss
from megatron_ft.link.facts.launcher import Attribution, FailureClass

_XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)(?:, pid='?(\d+))?(?:.*caused by previous Xid (\d+))?")
_FALLEN_OFF = re.compile(r"NVRM: .*fallen off the bus", re.DOTALL)
_MEMORY_KILL = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d+)")
_OF_THE_PROGRAM = (13, 31)
"""Xids that a kernel's own error raises."""
_NO_FAILURES = (43, 45, 63, 92)
"""Xids of a channel that is reset because of another error, of a row that was remapped, of a high rate of corrected
errors: no cause of a failure."""
_RECENT_S = 300
"""Seconds before a rank's end within which a line of the kernel's log may be about it."""
_OF_THE_DEVICE = re.compile(r"cuda|cublas|cudnn|nccl|acceleratorerror|device-side")
"""Error, in lower case, to which an Xid of the rank's GPU says more than the error itself."""
_MOST_LINES, _LONGEST_LINE = 8, 200
_WORKLOAD, _HARDWARE = FailureClass.WORKLOAD, FailureClass.HARDWARE
_NETWORK, _STORAGE, _CASCADE = FailureClass.NETWORK, FailureClass.STORAGE, FailureClass.CASCADE

_SIGNS: tuple[tuple[FailureClass, str, str], ...] = (
    # hardware, and a node whose driver isn't in order
    (
        _HARDWARE,
        "ECC error of the GPU",
        r"uncorrect(able|ed) .{0,20}ecc|double[- ]bit ecc|ecc_?uncorrectable|contained ecc"
        r"|row[ -]remap\w* (failure|failed|pending)",
    ),
    (
        _HARDWARE,
        "NVLink error",
        r"nvlink (hardware )?error|(uncorrectable|fatal) nvlink|nvlink_?uncorrectable|nvlink sharp|\bnvls\.cc\b"
        r"|\bsxid\b|nvswitch.{0,60}(error|fatal)",
    ),
    (
        _HARDWARE,
        "lost GPU",
        r"gpu[ _]is[ _]lost|fallen off the bus|unable to determine the device handle|cuda_?error_?device_?unavailable"
        r"|device\(s\) is/are busy or unavailable|all cuda-capable devices are busy",
    ),
    (_HARDWARE, "no GPU", r"no cuda gpus are available|no cuda-capable device|cuda_error_no_device"),
    (
        _HARDWARE,
        "fabric manager not ready",
        r"system not yet initialized|system_?not_?ready|fabric ?manager|fabric state",
    ),
    (
        _HARDWARE,
        "driver mismatch",
        r"driver/library version mismatch|unsupported display driver|failed to initialize nvml",
    ),
    (
        _HARDWARE,
        "driver not running",
        r"driver not loaded|nvml error|nvidia-smi has failed|communicate with the nvidia driver|rminitadapter failed",
    ),
    (
        _HARDWARE,
        "GPU hardware error",
        r"hardware stack error|cuda_error_hardware|gpu hardware (error|failure|fault)|\bgpu hang|hw exception by gpu"
        r"|amdgpu.{0,60}(\bras\b|gpu reset|poison|uncorrect)|hw slowdown|thermal (slowdown|violation)"
        r"|gpu requires reset|\bgsp (rpc|firmware)|from gsp\b|inforom is corrupt",
    ),
    (
        _HARDWARE,
        "machine error",
        r"machine check exception|hardware error.*mce|\bmce: .*hardware error|pcie bus error|\baer: .*uncorrect"
        r"|due to node failure|kernel panic",
    ),
    # memory that is a file, and what reads alike
    (_WORKLOAD, "kernel too large for the GPU", r"outofresources|out of resources?: "),
    (
        _WORKLOAD,
        "shared memory too small",
        r"(</torch_\d|shared memory|\bshm\b|/dev/shm).{0,200}(no space left|insufficient|too small|size limit)"
        r"|(no space left|insufficient|out of) .{0,60}(shared memory|/dev/shm)"
        r"|unable to mmap \d+ bytes from file </torch_|unable to open shared memory object",
    ),
    (_WORKLOAD, "heap corruption", r"malloc\(|free\(\): |double-linked list|corrupted size|double free"),
    # storage
    (_STORAGE, "disk full", r"no space left on device|errno 28\b|\benospc\b|\bdisk (is )?full\b"),
    (_STORAGE, "disk quota", r"quota (is |was |has been )?exceeded|errno 122\b|\bedquot\b|over quota"),
    (_STORAGE, "stale file handle", r"stale (nfs )?file handle|errno 116\b|\bestale\b"),
    (
        _STORAGE,
        "input/output error",
        r"input/output error|remote i/o error|disk i/o error|errno (5|121)\b|i/o error, dev",
    ),
    (_STORAGE, "read-only file system", r"read-only file system|errno 30\b"),
    (_STORAGE, "lost mount", r"transport endpoint is not connected|transport endpoint shutdown|errno (107|108|112)\b"),
    (
        _STORAGE,
        "file system error",
        r"lustreerror|ext4-fs error|nfs: server|\.nfs[\da-f]{4}|blk_update_request|buffer i/o error"
        r"|\b(xfs|gpfs|mmfs|weka|ceph|beegfs|fuse)\b.{0,40}(error|fail|unmount|evict)",
    ),
    (_STORAGE, "damaged file system", r"structure needs cleaning|errno 117\b|database disk image is malformed"),
    (_STORAGE, "no file lock", r"no locks available|errno (37|38|524)\b|unable to lock file|database is locked"),
    (
        _STORAGE,
        "failed write",
        r"pytorchstreamwriter failed|file write failed|unexpected pos \d+ vs \d+|\d+ requested and \d+ written"
        r"|iostream error|inline_container\.cc|(failed|unable) to write (to )?(the )?(file|disk|checkpoint)"
        r"|short write|file too large|errno 27\b",
    ),
    (
        _STORAGE,
        "damaged file",
        r"failed finding central directory|pytorchstreamreader failed|metadataincompletebuffer"
        r"|error while deserializing header|invalid_?header_?(deserialization|length|start)\b|invalid load key"
        r"|pickle data was truncated|unexpected eof, expected|ran out of input|unexpected end of (file|data)"
        r"|not a (zip|gzipped) file|file signature not found|truncated file|file read failed"
        r"|parquet magic bytes not found|end-of-stream marker|incomplete or truncated"
        r"|badzipfile|zlib\.error|lzmaerror|deserialize thrift|checksums? .{0,20}do(es)? not match"
        r"|\bcorrupt(ed|ion)?\b|hash(es)? (mismatch|do not match)|consistency check failed|datalosserror|arrowinvalid"
        r"|(file|checkpoint|archive|data|record|image)( file)? (is |was |seems |may be |appears to be )?"
        r"(corrupt|damaged|truncated|incomplete)|crc(32)? (mismatch|check|error)|checksum (mismatch|error|fail)"
        r"|(bad|invalid|wrong) magic|safetensor_?error|unpicklingerror|tarfile\.readerror|cannot identify image file",
    ),
    (
        _STORAGE,
        "object store",
        r"an error occurred \(\w+\) when calling the \w+ operation|reduce your request rate|nosuchkey|nosuchbucket"
        r"|an error occurred \((slowdown|internalerror|serviceunavailable|requesttimeout|50\d)\)|aws error [a-z_]+ "
        r"|unable to read s3|s3 (error|request|client).{0,40}(fail|error|time)|transport_?error.{0,40}s3|blobnotfound"
        r"|(50\d|429|closed|reset)\b.{0,200}(amazonaws\.com|googleapis\.com|blob\.core\.windows)"
        r"|google\.api_core\.exceptions\.(serviceunavailable|gatewaytimeout|internalservererror)"
        r"|azure\.core\.exceptions\.service(request|response)error|serverbusy.*azure",
    ),
    # network: signs of the link itself, not of a peer that is gone
    (
        _NETWORK,
        "InfiniBand error",
        r"got completion .*(status|error)[ =]*\d|ibv_\w+ failed|transport retry count"
        r"|async (fatal )?event.{0,60} error|local qp op|\bqp[ _]fatal|failed to modify qp|\brdma.{0,40}(fail|error)"
        r"|\b(ib|port|link|mlx5_\d+)\b.{0,40}\b(is down|went down|not active|no active)|async event: port error",
    ),
    (
        _NETWORK,
        "no route",
        r"no route to host|network is unreachable|network is down|no such host|errno (100|101|113)\b"
        r"|host is unreachable|(no|find) network device",
    ),
    (
        _NETWORK,
        "name resolution",
        r"name or service not known|name resolution|nameresolution|gaierror|nodename nor|hostname .{0,40}cannot be"
        r"|(could not|couldn't|can't|cannot|unable to|failed to) resolve (the )?(host|name|address|endpoint)"
        r"|getaddrinfo|no address associated|unknown host\b",
    ),
    (
        _NETWORK,
        "no connection",
        r"client socket has (timed out|failed to connect)|socket has failed to connect|to the c10d store has failed"
        r"|connectfullmesh failed|socketstartconnect: connect to|failed to connect to .* timed out"
        r"|\bconnect ((to|from) \S+ )?failed ?: ?(connection timed out|software caused)"
        r"|https?connectionpool\(.*(max retries exceeded|timed out)"
        r"|couldn't (connect to|reach) .?(https?://|\S+ on the hub)|remote ?end closed connection"
        r"|(connect|read) ?timeout (error|on endpoint)|cannot connect to host|serverdisconnected|connecttimeout"
        r"|incompleteread|could not connect to the endpoint url|\b50\d server error\b|\b50[234] (bad|service|gateway)\b"
        r"|(failed|unable|not|n't)( to)? connect( to|:)|urlopen error|dial tcp|handshake timeout|i/o timeout|\bcurl\b"
        r"|violation of protocol|\bconnect timeout\b|connection timed out|etimedout|errno 110\b|localentrynotfound"
        r"|too many requests|proxyerror|tunnel connection"
        r"|ssl(error|eoferror|zeroreturn)|certificate[_ ]verify|run initialization has timed out|commerror"
        r"|(hub|http|url|server|download).{0,60}(timed out|not reachable|unreachable)|offline ?mode is enabled",
    ),
    (
        _NETWORK,
        "no interface",
        r"no socket interface found|bootstrap : no socket interface|unable to find address for|errno 99\b"
        r"|cannot assign requested address|no (usable |suitable )?(network )?interface (was )?found|no such interface"
        r"|address family not supported|errno 97\b|with family \d+|af_inet",
    ),
    (
        _NETWORK,
        "UCX or OFI error",
        r"\bucx\b.*(endpoint|timeout|unreachable|connect)|transport error: endpoint|ucp_ep_create"
        r"|net/ofi .*(error|fail)|\befa\b.*(error|fail)|libfabric.*(error|fail|no provider)|\bfi_[a-z]+\b.*(fail|error)"
        r"|ofi.{0,60}(request completed with error|failed)",
    ),
    # the workload: memory, kernels, data
    (
        _WORKLOAD,
        "GPU out of memory",
        r"cuda out of memory|cuda error: out of memory|outofmemoryerror|cuda failure (\d+ )?'out of memory'"
        r"|cublas_status_alloc_failed|cuda_error_out_of_memory|failed to cuda calloc|hip out of memory"
        r"|hip error: out of memory|hiperroroutofmemory|failed to allocate .{0,60}(gpu|device|hbm)|resource_exhausted",
    ),
    (_WORKLOAD, "shared memory too small", r"bus error.*dataloader|dataloader worker.*bus error"),
    (
        _WORKLOAD,
        "host out of memory",
        r"\bmemoryerror|\bout of memory\b|cannot allocate memory|can't allocate memory|std::bad_alloc|errno 12\b"
        r"|\boom[-_ ]kill|out-of-memory handler",
    ),
    (_WORKLOAD, "dead data loader", r"dataloader worker .*(exited unexpectedly|is killed by signal)"),
    (_WORKLOAD, "assertion on the device", r"device-side assert|assertion [`'].*[`'] failed|cuda_error_assert"),
    (
        _WORKLOAD,
        "illegal memory access",
        r"illegal memory access|memory access fault by gpu|cuda_error_illegal_address|misaligned address",
    ),
    (
        _WORKLOAD,
        "invalid kernel",
        r"illegal instruction was encountered|no kernel image is available|invalid device function"
        r"|not supported (by|on) this (gpu|device)|hiperrornobinary|invalid configuration argument"
        r"|too many resources requested|ptxas|only supports .{0,40}gpus?\b"
        r"|requested functionality is not supported|(cublas|cudnn|cusparse)_status_(not_supported|arch_mismatch)",
    ),
    (
        _WORKLOAD,
        "failed compilation",
        r"torch\._(dynamo|inductor)\.|triton\.compiler|passmanager::run failed|nvcc fatal"
        r"|error building extension|ninja: build stopped|cuda_home|detected cuda version",
    ),
    (
        _WORKLOAD,
        "incompatible library",
        r"undefined symbol: |version `?glibc\w*_[\d.]+'? not found|cannot open shared object file|not compiled with"
        r"|not built with|cuda driver version is insufficient",
    ),
    (_WORKLOAD, "too many open files", r"too many open files|errno 24\b|items of ancdata"),
    (
        _WORKLOAD,
        "no access",
        r"\b40[134] client error|repositorynotfound|gated ?repo|not a valid model identifier|api[_ ]?key",
    ),
    (_WORKLOAD, "wrong arguments", r"error: (unrecognized arguments|argument -|the following arguments)"),
    (_WORKLOAD, "port in use", r"address already in use|errno 98\b|eaddrinuse|socket has failed to (bind|listen)"),
    (
        _WORKLOAD,
        "not a number",
        r"\bfound (nan|inf)\b|loss scale already|minimum loss scale|\bnans?\b.{0,30}(detected|found|in )"
        r"|became (infinite|nan)|non-?finite|unexpected result (nan|inf)"
        r"|\b(loss|grad\w*|norm)\b.{0,40}\b(is|=|:) ?(nan|inf)\b",
    ),
    (
        _WORKLOAD,
        "wrong shape or type",
        r"size mismatch|shapes? .{0,80}(mismatch|cannot be multiplied|invalid for)|mat1 and mat2"
        r"|must match the size of tensor|expected scalar type|should have the same dtype|input type .{0,60}weight type"
        r"|given groups=|invalid device ordinal|sizes of tensors must match|error\(s\) in loading state_dict"
        r"|missing keys?(\(s\))? in|shardedobjects? are missing|expected all tensors to be on the same",
    ),
    (
        _WORKLOAD,
        "misused autograd",
        r"mark a variable ready|expected to have finished reduction|does not require grad|by an inplace operation"
        r"|through the graph a second time",
    ),
    (
        _WORKLOAD,
        "misused collectives",
        r"init_process_group|re-?initialize cuda in forked|ncclinvalid(usage|argument)|duplicate gpu detected"
        r"|mismatch(ed)? .*collective|detected mismatch between collectives",
    ),
)
"""Class, sign, and regular expression for the lower-case text. The first match counts: what names the broken part
stands before what any part may write."""
_OF_A_PROGRAM = (
    *("AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError"),
    *("NotImplementedError", "RecursionError", "SyntaxError", "IndentationError", "TypeError", "UnboundLocalError"),
    *(
        "ValueError",
        "ZeroDivisionError",
        "FloatingPointError",
        "ValidationError",
        "FileNotFoundError",
        "PermissionError",
        "UnicodeDecodeError",
        "OverflowError",
    ),
    *("JSONDecodeError", "argparse.ArgumentError", "StopIteration", "IsADirectoryError", "NotADirectoryError"),
)
"""Exceptions of Python that come from the program, its arguments or its data."""
_TOPICS = (
    (
        _HARDWARE,
        re.compile(r"\bedac\b|\b_?kgsp|\bgsp\b|\bnode fail(ure|ed)|\bmce\b|nvswitch|\becc\b|driver (hang|crash|reset)"),
    ),
    (
        _NETWORK,
        re.compile(
            r"\bnet/(ib|ofi|socket|plugin)|\brocev?\d?\b|infiniband|libfabric|\befa\b|tcp connection"
            r"|server disconnected|\bmlx\d|\bhca\b|\bibv_|\brdma|firewall|\bdns\b|unreachable|network interface"
        ),
    ),
    (
        _STORAGE,
        re.compile(
            r"\b(gs|s3|hdfs|az|abfs)://|\bfile ?system|\bmount (point|failed)|\blustre|\bgpfs|\bnfs\b|object storage"
        ),
    ),
)
"""Class of a text that fits no sign, by the part of the machine that it names."""
_COMPILED = tuple((kind, sign, re.compile(pattern, re.DOTALL)) for kind, sign, pattern in _SIGNS)
_LOST_PEER = re.compile(
    r"ncclremoteerror|remote process exit|watchdog caught collective|socket recv failed while polling"
    r"|communicator was aborted|heartbeat monitor timed out|collective operation timeout"
    r"|nccl operations have failed or timed|heartbeat time|caused pair closure|times? out.{0,40}remote rank"
    r"|remote (task|peer|rank|worker|end|side)\b.{0,40}(fail|exit|clos|died|crash|lost|did not)"
    r"|actor (died|is dead|has died)|worker (process )?(has died|died|unexpectedly exits)|rendezvousclosed"
    r"|(another|other|a different) (rank|worker|process|node|task)s? (has |have )?(failed|exited|died|crashed)"
    r"|waiting \d+ms for (recv|send) operation|recvvalue failed|sendbytes failed|recvbytes failed"
    r"|srun: error: .{0,60}(exited with|killed|terminated)|mpi_abort was invoked|got signal: ?15"
    r"|processexitedexception|processraisedexception|childfailederror|broken pipe.{0,80}(store|rank)"
    r"|(store|rank).{0,80}broken pipe|monitoredbarrier|exception on one of the ranks|ownerdied"
    r"|lost communication with|peer .{0,30}(gone|exited|disconnected|died|down)|closing signal sig"
    r"|taking the entire process down|failed to recv, got 0 bytes",
)


def attribute(error: str, kernel: Iterable[str] = (), *, pid: int | None = None) -> Attribution | None:
    """Return the class of a failure; None if it is unknown.

    An error of the program keeps its class beside an Xid, which is named as well.

    Args:
        error: exception, "type: message", or another text of the process; empty if it left none.
        kernel: lines of the node's kernel log about this rank, as `telling_kernel_lines` returns them.
        pid: process of the rank, which the kernel may have killed for lack of memory.
    """
    by_kernel, by_error = _attribute_kernel(tuple(kernel), pid), _attribute_error(error)
    if by_kernel is None or by_error is None or _OF_THE_DEVICE.search(error.lower()):
        return by_kernel or by_error
    return Attribution(kind=by_error.kind, sign="; also ".join(filter(None, (by_error.sign, by_kernel.sign))))


def _attribute_error(error: str) -> Attribution | None:
    text = error.lower()
    for kind, sign, pattern in _COMPILED:
        if pattern.search(text):
            return Attribution(kind=kind, sign=sign)
    if _LOST_PEER.search(text) or is_peer_loss(error):
        return Attribution(kind=_CASCADE)  # the line says so in its own words
    names = [part.rpartition(" ")[2] for part in error.split(":")[:-1]]  # a group's, and that of its first exception
    if any(name.endswith(_OF_A_PROGRAM) for name in names):
        return Attribution(kind=_WORKLOAD)
    return next((Attribution(kind=kind) for kind, topic in _TOPICS if topic.search(text)), None)


def _attribute_kernel(lines: tuple[str, ...], pid: int | None) -> Attribution | None:
    found = (int(match[4] or match[2]) for line in lines if (match := _XID.search(line)))
    numbers = sorted((xid for xid in found if xid not in _NO_FAILURES), key=lambda xid: xid in _OF_THE_PROGRAM)
    if numbers:
        kind = _WORKLOAD if numbers[0] in _OF_THE_PROGRAM else _HARDWARE
        return Attribution(kind=kind, sign=f"Xid {numbers[0]}")
    if any(_FALLEN_OFF.search(line) for line in lines):
        return Attribution(kind=_HARDWARE, sign="lost GPU")
    killed = {int(match[1]) for line in lines if (match := _MEMORY_KILL.search(line))}
    return Attribution(kind=_WORKLOAD, sign="host out of memory, killed by the kernel") if pid in killed else None


def telling_kernel_lines(
    records: Iterable[str], *, since_us: int, until_us: int, pid: int, gpu: str
) -> tuple[str, ...]:
    """Return the lines about a rank's GPU, or its process, without their prefix.

    Args:
        records: of /dev/kmsg: "priority,number,microseconds,flags;text".
        since_us: start of the rank, since the node's boot; ``until_us``: its end. Only the last five minutes count.
        pid: process of the rank; gpu: PCI address of its GPU, "0000:3b:00"; empty if unknown.
    """
    since_us, found = max(since_us, until_us - _RECENT_S * 1_000_000), []
    for record in records:
        head, _, text = record.partition(";")
        stamp = head.split(",")[2:3]
        if not (stamp and stamp[0].isdigit() and int(stamp[0]) >= since_us):
            continue
        xid, of_gpu = _XID.search(text), bool(gpu) and gpu.lower() in text.lower()
        is_own = of_gpu or (xid[3] == str(pid) if xid else _MEMORY_KILL.search(text) is not None)
        if is_own and (xid or _FALLEN_OFF.search(text) or _MEMORY_KILL.search(text)):
            found.append(text[:_LONGEST_LINE])
    return tuple(found[-_MOST_LINES:])
