"""Every bound of the service, with the relations between them asserted at import.

Nothing in `kvstore` grows without one of these. `nic_offload`, `kvcli` and `sim`, which can't import this, have their
bounds at the top of the modules that check them. Names end in their unit.
"""

from __future__ import annotations

PAGE_BYTES = 4096  # the unit of the drive: O_DIRECT offsets, lengths and addresses
SECTOR_BYTES = 512  # the largest write that drives are known not to tear
HEADER_BYTES = PAGE_BYTES  # a record starts with one header page

KEY_BYTES = 32
TENANT_BYTES = 16
FINGERPRINT_BYTES = 16
USER_BYTES = 16
DOMAIN_BYTES = 16  # of an erase domain
SESSION_BYTES = 16
GENERATION_MAX = (1 << 56) - 1  # shares a 64-bit ack word with an 8-bit code

THRESHOLD_MAX = (1 << 64) - 1  # of a block: the largest value of a flag word
BLOCK_BYTES_MIN = 1
BLOCK_BYTES_MAX = 64 << 20
BATCH_BLOCKS_MAX = 1024  # blocks named in one call
FABRIC_CALL_PLACES = 4  # calls over the fabric of one client under way; others wait there
FABRIC_CALL_BYTES = 72 << 10  # of one, and
FABRIC_ANSWER_BYTES = 36 << 10  # of its answer: both name as many blocks as a call may
GET_BLOCKS_MAX = 1 << 17  # in one get, which is split into calls: 1 M tokens are 65,536 blocks of 16
BATCH_PUTS_AHEAD = 64  # blocks of a stream that wait for the drive
BATCH_ENDS_UNREAD_MAX = 8192  # results that a stream's client has not read; beyond it no block is accepted
BATCH_READS_AHEAD = 8  # blocks of a stream that are read while others are sent
LAYERS_MAX = 4096  # of a model
SHARDS_MAX = 4096  # of its KV, whose blocks are combined into those of another number of shards
RESUME_BATCH_BLOCKS = 128  # of a session, requested at a time
RESUME_AHEAD_BATCHES = 2  # of these in flight at a time
RESHARD_SCRATCH_BYTES = 64 << 20  # for combining stored shards; at least one block's worth

PREFIX_STEP_BLOCKS = 128  # looked up at a time, of a prefix on several drives

SESSION_CHUNK_BLOCKS = 126  # keys in a chunk of a manifest: as many as fit into a page of LMDB's
SESSION_CHUNKS_MAX = 528  # 66,528 blocks: 1 M tokens in blocks of 16, and some
SESSION_BLOCKS_MAX = SESSION_CHUNK_BLOCKS * SESSION_CHUNKS_MAX  # of one session
SESSION_TIME_TO_LIVE_MS_MAX = 100 * 365 * 86_400_000  # of a session that expires
SESSION_TURNS_MAX = 1024  # of one session: its table of turns is rewritten with each
SESSION_TURNS_CACHED = 16  # such tables, the last read
SESSION_TURN_TOKENS_MAX = (1 << 32) - 1  # of one turn
SESSION_LABEL_BYTES_MAX = 128  # of a session's name, in UTF-8
SESSIONS_EXPIRED_AT_ONCE = 2  # before other work gets a turn: a long one's first step takes a millisecond
SESSION_STEP_BLOCKS = 2048  # of a session, read at a time; a change of more is a long one
SESSION_SLICE_BLOCKS = 2 * SESSION_CHUNK_BLOCKS  # of a session, changed at a time
SESSION_DROP_BLOCKS = 32  # of a session, deleted at a time
SESSIONS_SHARE = 2  # one part in this many of a drive may be records of sessions
SESSIONS_LISTED_STEP = 1  # sessions of a list, read at a time: a long one takes a millisecond
SESSIONS_LISTED_MAX = 256  # in one page of a list

CLIENTS_MAX = 4096  # attached to a node; its descriptors and ports may be fewer
DESCRIPTORS_KEPT = 256  # for drives, listeners and callers that have not attached
DESCRIPTORS_OF_CLIENT = 4  # its endpoint, its connections, and its calls
# Each attachment has its own port at the node; except on loopback, one of these, unless others are configured.
FABRIC_PORT_FIRST = 7071
FABRIC_PORT_LAST = 7199
# A source is an IPv4 address, or the /64 of an IPv6 one.
GUARD_CHECK_MS = 100  # between two checks of the connections at the node's ports,
GUARD_CHECK_AGAIN_MS = 20  # if the first ended some: its peer's next ones wait to be accepted
HEAP_GROWN_BYTES_MAX = 32 << 20  # growth after which a node runs the garbage collector
HEAP_FREE_BYTES_MAX = 16 << 20  # free memory that a node's malloc may keep
HEAP_END_BYTES_MAX = 8 << 20  # free memory that may stay at the end of each thread's heap
HEAP_BUFFER_BYTES_MAX = 4 << 20  # what is larger is in no heap, and returned when it is freed
HEAP_LOOK_MS = 5_000
SHARE_CALL_MS = 1_000  # to present a pass for the hot memory, and to get it
SHARE_CALLERS_MAX = 64  # served at a time for that
SHARE_PASS_BYTES = 16
SHARE_PASS_MS = 10_000  # after which an unused pass is void
SHARE_REST_MS = 200  # pause before accepting again when no descriptor was left
DIRECT_BYTES_MAX = 64 << 20  # that a get copies from the node's memory itself, if its caller waits for it,
DIRECT_AHEAD_BYTES_MAX = 2 << 20  # and while its caller expects to go on
SHARE_SLOTS_MAX = 256  # connections whose slots are or may be mapped: three descriptors each
GUARD_QUICK_CHECK_MS = 500  # between two checks for new connections, while all known ones are authenticated
GUARD_CHECK_IDLE_MS = 5_000  # between two full checks meanwhile: a library may be late to accept
GUARD_HANDSHAKE_MS = 5_000  # of TLS and HTTP/2
GUARD_FIRST_MESSAGE_MS = 5_000  # from a call's beginning to its first message
GUARD_TIMEOUT_MS = 10_000  # of a connection without an admitted call
GUARD_ANSWER_BYTES_MIN = 4 << 10  # that an answer counts for, with its call
GUARD_ANSWERS_BYTES_MAX = 64 << 20  # of answers that callers have not read
METADATA_MAX = 64  # entries of one call; gRPC bounds them only for a peer that respects its settings
GUARD_STREAMS_MAX = 256  # open calls over one gRPC connection
GUARD_UNAUTHENTICATED_OF_SOURCE_MAX = 64  # connections without an admitted call
GUARD_CONNECTIONS_OF_SOURCE_MAX = 1024
GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX = 4  # to its endpoint; a provider makes one or two
GUARD_WINDOW_MS = 2_000
GUARD_ATTEMPTS_OF_SOURCE_MAX = 200  # connections begun and calls refused, in that time, before it is barred
GUARD_UNAUTHENTICATED_BYTES_MAX = 256 << 10  # that may arrive over a connection without an admitted call,
GUARD_UNAUTHENTICATED_BYTES_MS = 1_000  # and for how long there may be more, as a busy node admits calls late
GUARD_REPEATS_MAX = 32  # calls of a connection, within GUARD_WINDOW_MS, Overloaded or cancelled in the queue
GUARD_REPEATS_KEPT_MAX = 4_096  # between two checks
GUARD_ATTEMPTS_PER_REPEATING = 20  # that a connection with more such calls counts for
GUARD_ATTEMPTS_PER_OVERSIZED = 50  # that an unauthenticated connection with too many bytes counts for
GUARD_ATTEMPT_BYTES = 16 << 10  # a new connection without an admitted call counts once more per this many,
GUARD_ATTEMPTS_PER_NEW_MAX = 10  # at most this many times
# Bytes of a source outside messages that were read; a message that is still arriving counts until then.
GUARD_FRAMES_BYTES_S = 4 << 20  # per second, permanently
GUARD_FRAMES_BYTES_MAX = 32 << 20  # in addition, as a burst
GUARD_SEGMENTS_MAX = 256  # of TCP between two quick checks: with fewer, the next full check is not earlier
GUARD_CALL_BYTES = 4 << 10  # that a call may have besides its messages, mostly headers
GUARD_MESSAGE_BYTES = 64  # the same for a message,
GUARD_MESSAGE_SHARE = 16  # plus one part in this many of its size: frames, and TLS
GUARD_BARRED_MS = 10_000
GUARD_BARRED_SOURCES_MAX = 512  # the kernel accepts filters of 4096 instructions; an IPv6 source needs 5
CALLS_BEGUN_MAX = 4  # at a time, on a node with one tenant; with several, one call of each
CALLS_WAIT_MS = 1  # between two checks of a begun call: one that waits for the same at both no longer counts
CALLS_BEGUN_LOOKS_MAX = 100  # checks, after which it no longer counts in any case
CALLS_PENDING_MAX = 6_144  # in gRPC, not accepted yet, about 14 KiB each; includes calls that were reset
CALLS_LINE_LONG = 128  # waiting calls of a tenant; with more of them,
CALLS_REST_MS = 2  # it leaves this much to others between two of its calls, while they call
CALLS_WORK_US = 300  # after a call that had the thread for longer,
CALLS_REST = 1  # the tenant leaves this many times as much to others before its next, while they call
CALLS_OUTSIDE_MAX = 8_192  # calls in the queues of tenants
OPEN_CALLS_MAX = 16_384  # streams of a node, including attached clients
CLUSTER_LEASE_S = 5  # how long a member may be silent
CLUSTER_CONFIRM_MS = 1_000  # between a node's checks that its list of members is the latest
SESSIONS_KNOWN_MS = 4_000  # how long after such a check a node orders sessions by its list
SESSIONS_TAKING_MS = 5_000  # how long a node is a user's home before it orders what another has ordered
SESSIONS_EPOCHS_MAX = 1 << 32  # of a lot, in one history of etcd's data
SESSIONS_LAST_TRY_MS = 500  # a client with less time left doesn't retry
SESSIONS_RETRY_MS = 100  # before a client retries a node that does not order a user's sessions yet
CLUSTER_KEEP_MS = 1_500  # between two renewals of a member's lease
CLUSTER_RETRY_MS = 500  # before etcd is called again after it was down
CLUSTER_WEIGHT_MAX = 1 << 20  # of a member
CLUSTER_NAME_CHARACTERS_MAX = 64
MEMBER_TEXT_CHARACTERS_MAX = 256  # of a member's name, version, state and zone
ASYNC_CALLS_MAX = 64  # of one asyncio client, at a time: each uses a thread
CLUSTER_CALLS_AT_ONCE = 32  # of one client, to its nodes
CLUSTER_INLINE_AT_ONCE = 64  # blocks got over gRPC before the first of them is yielded
CLUSTER_FIRST_TRY_MS = 1_000  # of a get, before it tries a block's second owner
CLUSTER_PROBE_AFTER_MS = 200  # of a call without an answer, before its node is probed
CLUSTER_PROBE_MS = 800  # without an answer to a probe, after which a node is not called
CLUSTER_PROBE_LATE_MS = 100  # by which the probing thread may be late for a probe without an answer to count
CLUSTER_PROBES_LATE_MAX = 2  # in a row that don't count
CLUSTER_PROBE_PAUSE_MS_MAX = 1_000  # between probes of a node that doesn't answer
CLUSTER_LAST_COPY_MS = 200  # that a put waits for its second copy, where one is enough
CLUSTER_LEFT_MS = 900_000  # after a node has left the map, until its client is closed
REPLICAS_MAX = 2  # of a block
MAP_PLACEMENTS_CACHED = 4  # of a cluster's maps
PLACEMENTS_CACHED = 8  # orders of drives or nodes for all lots
PLACEMENT_DRIVES_CACHED = 32  # drives or nodes whose lots are known, of 64 KiB each
OWNERS_MAX = REPLICAS_MAX + 1  # of a block that a get asks for it
OWNER_DRAWS_AT_ONCE = 1 << 19  # in memory, while the owners of all lots are computed
CLUSTER_LOTS = 1 << 19  # of a new cluster; at 1,000 nodes the fullest has 1.1 times the mean
CLUSTER_LOTS_MAX = 1 << 24  # of any
ZONE_CHARACTERS_MAX = 64  # in a zone's name
REPAIR_BYTES_MAX = 64 << 20  # of blocks that a client holds to put them back to their first owners
REPAIR_CALL_MS = 5_000  # of the call that puts one block back
COPY_LATE_MS = 120_000  # for which a client's data may be unacknowledged: a silent connection ends sooner
DELETIONS_KEPT_MAX = 1 << 16  # that a node remembers, so that no copy undoes them
UPKEEP_ASKED_BLOCKS = 256  # of a node's index, scanned and asked of other owners at a time
UPKEEP_OFFERED_BLOCKS = 16  # announced to an owner together, before their bytes are sent
UPKEEP_AT_ONCE = 2  # blocks that a node sends to others at a time
UPKEEP_BYTES_PER_S = 32 << 20  # of these
UPKEEP_CALL_MS = 10_000  # of a query, or of one block
UPKEEP_SETTLE_MS = 1_000  # without a change of the map, before a node scans its blocks
UPKEEP_RETRY_MS = 5_000  # until the next scan after some could not be copied; twice as long each time
UPKEEP_EVERY_MS = 600_000  # between two scans without a change of the map
UPKEEP_WAITED_BLOCKS_MAX = 4096  # that a node expects, from all others
UPKEEP_WAITED_MS = 60_000  # for which it expects one
UPKEEP_FREE_SHARE = 32  # one part in this many of a node's drives is not filled with copies
SESSIONS_MOVE_MS = 2_000  # for which a user's first step on a new home waits for their sessions
SESSIONS_MOVED_MAX = 256  # of one user, the last used ones
SESSIONS_MOVE_RETRY_MS = 1_000  # until a former home tries again what could not be moved
SESSIONS_SILENT_MS = 10_000  # of a former home on the map: then its standby is believed
SESSIONS_MOVED_BLOCKS_MAX = 1 << 18  # of moved sessions, that a node has to send, or that it lacks
SESSIONS_USERS_KNOWN_MAX = 1 << 16  # users whose names a node remembers, the last who used sessions here
SESSIONS_STANDBY_MS = 1_000  # for which a step waits for the copy of its session
SESSIONS_STANDBY_RETRY_MS = 5_000  # until a node that did not take copies is asked again
SESSIONS_STANDBY_LOTS_MAX = 1 << 16  # whose standbys a home remembers, and whose copies a standby accepts
SESSIONS_STANDBY_USERS_MAX = 1 << 10  # of a lot, that a new standby gets first; that a client knows
SESSIONS_COPIES_CHECK_MS = 10_000  # between checks of some users' copies: is the node still their standby?
SESSIONS_COPIES_AT_ONCE = 64  # sent in one call; and lots that are looked at together
SESSIONS_USERS_TAKEN_MAX = 1 << 17  # lots that a node has taken over, and users whose sessions it has since
UPKEEP_SECRET_BYTES_MIN = 32  # of a cluster's secret
FOLLOW_NEXT_MS = 300  # without a node's answer, after which the next one is asked for the map as well
FOLLOW_AT_ONCE = 16  # nodes that one client asks for the map at the same time
FOLLOW_RETRY_MS = 500  # before a client asks its nodes for the map again, if none has answered
ETCD_CALL_MS = 2_000
# Twice etcd's least (--grpc-keepalive-min-time): it closes a connection over which three pings came earlier.
ETCD_KEEPALIVE_MS = 10_000
ETCD_ENDPOINTS_MAX = 16
ETCD_RELIST_MS = 10_000  # between two reads of the list of members, besides the watch
TENANTS_MAX = 4096  # of a node
QUOTA_OWNERS_MAX = TENANTS_MAX  # tenants that have had a quota since the node was started
NODES_MAX = 64  # in one client's list
AUDIT_LINES_PER_S = 100  # of refusals and removals; further ones are only counted
AUDIT_LINES_OF_ONE_PER_S = 20  # of one tenant, or of one source where no tenant is known
AUDIT_NAMES_MAX = 8  # of blocks or sessions removed together
WATCHERS_MAX = 256  # of a node
WATCHERS_OF_TENANT_MAX = 8
EVENTS_QUEUED_MAX = 100_000  # blocks whose events are not published yet
EVENTS_REPLAYED_MAX = 10_000  # published messages that a reader can request again
EVENTS_UNREAD_MAX = 10_000  # messages queued for one reader; it can request missed ones again
WATCH_EVENTS_MAX = 4096  # queued for one watcher; further ones are only counted
WATCH_EVENTS_SENT_MAX = 512  # in one message
WATCH_REST_MS = 20  # between two messages: events in between are sent in one
WATCH_HEARTBEAT_MS = 5_000
SLOTS_PER_CLIENT_MAX = 1024
GRANTED_SLOTS = 8  # of one client, which writes into them without a call; each is free once it was read
GRANTED_BYTES_MAX = 2 << 30  # of slots granted to a node's clients
GRANTED_PUTS = 4096  # of one client, fired and not ended
ROOMS_MIN = 64  # for blocks that land by grants, given to each client's receiver in advance
ROOMS_MAX = 4096
LENT_MAX = 4  # pieces of a drive's ground that a lane has, or had, and not all records are in the index
LENT_PAGES = 1 << 16  # of one piece, at most,
LENT_SHARE = 64  # and at most this part of a drive; or, for large records,
LENT_LARGE_RECORDS = 8  # room for this many,
LENT_SHARE_OF_LARGE = 16  # at most this part of a drive,
LENT_SHARE_OF_FREE = 4  # and at most this part of its free pages
LENT_RECORDS_MAX = 1024  # on one piece
LENT_RECORDS_LEAST = 16  # room for so many, or half of the above: what is free in smaller pieces is not lent
LANE_QUOTA_BYTES = 16 << 20  # of a tenant's quota, lent to one client for its blocks on lanes
QUOTA_LENT_SHARE = 32  # at most this part of the quota is lent to all its clients together
LANE_DEPTH = 256  # writes of a lane at a time
LANE_BYTES_MAX = 16 << 20  # of these: further blocks wait for their tenant's turn
GRANTED_GATHERED_PAGES_MAX = 65  # of a block that waits for others; a larger one keeps a drive busy by itself
GRANTED_TAKE_MS = 30  # between two times at which written blocks are added to the index, unless somebody asks
GRANTED_RETRY_MS = 1  # before a drive with too many writes is offered more
START_PROGRESS_MS = 1_000  # between two progress lines of a starting node
ROOMS_IDLE_TICKS = 10  # after which a client that puts nothing keeps no rooms
LANDING_AT_ONCE_BYTES = 1 << 20  # of landing memory, allocated while a reservation waits
LANDING_BYTES_MAX = 4 << 30  # landing memory of all clients of a node together

LEASES_MAX = 32_768  # of a node; its garbage collector scans each: 10 ms for all
LEASE_TIMEOUT_MS = 30_000
LEASE_TIMEOUT_MS_MAX = 600_000
LEASE_MARGIN_MS = 1_000  # how long before the end of its lease a client gives up a put
STALLED_MS = 5_000  # without sending any pending bytes, after which either side ends a link
STALLED_LOOK_MS = 1_000  # between two checks for that
QUARANTINE_TIMEOUT_MS = 5_000  # an expired lease not given back within this ends the connection

PIN_TIMEOUT_MS = 30_000  # of a pin without a requested time
PIN_TIMEOUT_MS_MAX = 600_000
PINS_MAX = 8192  # of all tenants of a node
PINS_OF_TENANT_MAX = 1024
PINNED_ENDED_AT_ONCE = 1024  # blocks of expired pins, before other work gets a turn

ERASE_TIMEOUT_S = 600.0  # of a call that erases a user or a tenant
ERASED_COPIES_REFUSED_MS = 60_000  # for which a node refuses copies of what it has erased
ERASE_ROUND_MS = (
    45_000  # for all nodes of a cluster to erase it, else they are called again; the rest is for a copy
)
ERASE_WIPED_BYTES = 4 << 20  # of free hot memory that an erasure overwrites before other work gets a turn
ERASE_LOOK_BLOCKS = 128  # entries that an erasure examines before other work gets a turn
ERASE_STEP_BLOCKS = 1024  # that it deletes together
ERASE_WAIT_MS = 10_000  # for room in the audit log, before it begins
ERASE_WAIT_LOOK_MS = 100  # between two checks for it
ERASURES_WAITING_MAX = 100  # of a tenant, for that: five seconds of its lines
ERASE_LOOKS_MAX = 4  # passes over a session's blocks before it is removed: clients may add some meanwhile
VAULT_KEYS_MAX = 1 << 14  # unwrapped keys in locked memory: 1.5 MiB of the 8 MiB that a process may lock
VAULT_NAMES_MAX = 1 << 16  # domains whose keys are known without reading the keyring
MASTER_COMMAND_MS = 10_000  # for a command that prints the master key
MASTER_FILE_BYTES_MAX = 66  # 64 hexadecimal digits and the end of the line
MASTER_ID_BYTES_MAX = 64
MASTER_WRAPPED_BYTES_MAX = 180  # of a wrapped key, as a master key's service returns it
VAULT_CALL_MS = 5_000  # of a call to Vault, from the look-up of its name to the last byte
VAULT_ANSWER_BYTES_MAX = 64 << 10
CONTROL_CALLERS_MAX = 4  # of a node's socket for its keys
CONTROL_LINE_BYTES_MAX = 4096  # of a caller's message
CONTROL_ASK_MS = 10_000  # for a caller to send it; it may call Vault before
CONTROL_CALL_MS = 600_000  # for a rotation: a keyring of 4,194,304 keys takes five minutes
KEYRING_SLOTS_MAX = 1 << 22  # keys of a store: 512 MiB
KEYRING_TENANT_KEYS_MAX = 3 << 20  # of these for one tenant: the others need some too
KEYRING_STEP_PAGES_MIN = 16
KEYRING_STEP_PAGES_MAX = 256  # by which a keyring grows
KEYRING_DAMAGED_LOGGED_MAX = 1024  # damaged slots that are logged, each once
KEYRING_STRAYS_MAX = 64  # moved slots whose right places are searched; others count as unreadable
KEYRING_LOAD_PAGES = 1024  # read at a time
KEYRING_PAGES_AT_ONCE = 64  # written at a time
KEYRING_SLOTS_TRIED_AT_ONCE = 1 << 15  # with one key
KEYRING_ROTATED_AT_ONCE = 1024  # keys of a tenant, before other threads may change the keyring
KEYRING_TENANTS_UNSEALED_MAX = 1024  # tenants' keys that are kept unsealed
KEYRING_NEW_NAMES_MAX = 1 << 16  # in a dictionary, until they are merged into the sorted names
RECEIPT_KEYS_MAX = 64  # listed in a receipt; the others are counted, and its digest covers all

DRIVES_MAX = 32  # of one store
GENERATIONS_RESERVED_AT_ONCE = 1 << 30  # by one write of the superblock
GENERATIONS_PER_DRIVE = (GENERATION_MAX + 1) // DRIVES_MAX  # so that no two drives use the same one

DRIVE_CAPACITY_BYTES_MIN = 16 << 20
DRIVE_CAPACITY_BYTES_MAX = 16 << 40  # its roll, one bit per page, is built in memory: 512 MiB
DRIVE_CAPACITY_BYTES_DEFAULT = 1 << 30  # of a drive file without a given size
DRIVE_QUEUE_DEPTH = 256
DRIVE_INFLIGHT_BYTES_MAX = 32 << 20
DRIVE_INFLIGHT_READ_BYTES_MAX = 8 << 20  # a reader has half of it in flight, and copies the rest
FETCHES_A_ROUND = 64  # begun before other work gets the thread
FABRIC_CALLS_MS = 1  # of fabric calls in one round of the loop: each tenant's turn is one call
FABRIC_WORK_US = 500  # at a stretch, after which a tenant pauses while others call,
FABRIC_REST = 3  # this many times as long
FETCHES_QUEUED_MAX = 16 * BATCH_BLOCKS_MAX
STAGED_IDLE_BYTES_MAX = 64 << 20  # memory for encrypted records that is kept for the next ones
WIPES_AT_ONCE = 64  # headers that are overwritten together, in as many operations
DRIVE_INFLIGHT_OPS_MIN = 2  # so that blocks larger than half of the bytes still overlap
STORE_QUEUED_MAX = 4 * BATCH_BLOCKS_MAX  # puts, and as many gets, that a drive has accepted and not answered
DELETES_QUEUED_MAX = 4 * BATCH_BLOCKS_MAX  # deletes that a drive has accepted and not answered
SESSIONS_QUEUED_MAX = 1024  # changes of sessions that it has accepted and not answered
CHECKS_AT_ONCE = 4  # records of a drive that are read and checked because a put depends on them
CHECK_PIECE_BYTES = 1 << 20  # of such a record, read at a time
ENCRYPT_PIECE_BYTES = 1 << 20  # of records in the clear, read or overwritten at a time
ENCRYPT_STRETCH_BYTES = 16 << 20  # of these at a stretch, which one block may exceed
ENCRYPT_SHARE = 4  # one part in this many of the time is spent on it
ENCRYPT_REST_MS = 100  # after a stretch, however short it was
ENCRYPT_LOOKED_AT_ONCE = 1024  # rows of the index
SCRUB_PIECE_BYTES = 256 << 10  # of a quarantined extent, overwritten one at a time
UNSYNCED_FREES_MAX = 256  # records replaced by others that are not synced; more cause a sync
FILL_PIECE_BYTES = 1 << 20  # of zeros, written at a time to a drive that is formatted
BLANK_BYTES = 1 << 20  # of zeros at a drive's start: it is blank
BOUNCE_BYTES = 1 << 20  # that a drive reads or writes at a time while its caller waits
ZERO_FILL_BYTES_MAX = 2 << 30  # a larger drive is not filled with zeros when it is formatted
INDEX_HEADERS_CHECKED_MAX = 1024  # records compared with an index that was not closed
FREE_HEADERS_CHECKED_MAX = 256  # free extents, and as many of the oldest records, that are checked then too
SCAN_UNREADABLE_PAGES_MAX = 1024  # a drive with more is not recovered but reported
SCAN_WINDOW_BYTES = 256 << 10  # one read of this much costs little more than one of a page
SCAN_SKIPPED_BYTES = 64 << 10  # a larger record isn't read for the headers after it
SCAN_BATCH_RECORDS = 4096  # found by a scan, added to the index together
EXTENTS_AT_ONCE = 4096  # of the C core's map, returned by one call
HOT_BYTES_DEFAULT = 256 << 20  # memory through which reads go to clients, and in which they stay
HOT_BYTES_MIN = 128 << 20
COLD_BYTES_MAX = 16 << 20  # of blocks that the C core reads by itself at a time, and of the rooms for them,
COLD_SHARE = 16  # and at most this part of the hot memory
SHARES = 8  # a caller that receives nothing may hold one part in this many of the hot memory
TURN_BYTES = 1 << 20  # of one tenant, before the next one's turn
SEND_BYTES_MAX = 2 << 20  # of payloads handed to a reader together, unless one is larger
TURN_STEP_BLOCKS = 16  # of a call that names many: up to a millisecond, if they are deleted
SLOTS_A_STEP = 64  # of a call that leases or returns many: a millisecond or two
TURN_STEP_PUTS = 8  # of a stream that puts many: a millisecond, if others must be evicted for them
TURNS_OTHERS_MS = 1_000  # for which a tenant counts as active after a call
MOVING_MAX = 2  # blocks of a tenant over gRPC at a time, while others call;
MOVING_MS = 250  # after which a slower one gives its place to the next
READ_AHEAD_BYTES = 20 << 20  # read for fetches at a time: a later caller waits for at most this much

PREFETCHES_MAX = 64  # sessions that wait to be read into the hot memory; of one tenant, at most an eighth
PREFETCH_BLOCKS_MAX = 8192  # of one session
PREFETCH_AHEAD_BYTES = 2 << 20  # read from the drive for prefetches at a time, while no fetch waits
WARM_BLOCKS_MAX = 65_536  # of a drive, read back into the hot memory at a start,
WARM_SHARE = 2  # of which they fill one part in this many,
WARM_BLOCKS_STEP = 256  # so many at a time,
WARM_MS = 1_000  # and within this time

GET_THREADS = 4  # of a compute node: gets of arrivals being sent to nodes at a time
PREFETCH_THREADS = 4  # of a compute node: prefetches that wait for their nodes at a time
ARRIVAL_GRACE_MS = 1_000  # between the deadlines of a request's gets and of the request
TRANSFERS_WAITING_MAX = 65_536  # for the requester's catalogue; beyond that the oldest are lost
SESSIONS_FOLLOWED_MAX = 1024  # whose transfers a compute node's catalogue follows
RULES_COUNTED_MAX = 256  # rules whose counters a compute node reports by name
LEARNT_SESSIONS_MAX = 64  # the latest of one user, looked up when nothing is known of the user

PUTS_SEEN_MAX = 64  # latest puts whose times a node remembers
TRACES_MAX = 1024  # sessions whose events a node remembers
PUTS_TOGETHER_MS = 10  # between blocks that form one row, and one step of a trace
PUTS_ROW_MS = 100  # the time that one row covers
TRACE_LOOKED_BACK = 6  # latest steps of a trace that are searched for a block's step
TRACE_STEPS_MAX = 128  # of one session: the last turns
TRACE_FLAGS_MAX = 16  # of one session: flags that wait for a row of puts, and rows that wait for flags
STEPS_REPORTED_MAX = 32  # with one call
STEP_DETAIL_BYTES_MAX = 96
STEP_CLOCK_BYTES = 8
STEP_FIRINGS_MAX = 8  # of one batch of puts, reported one by one
STEP_PUTS_FOLLOWED_MAX = 16  # batches of a session's puts whose ends have not been reported

SPANS_WAITING_MAX = 1024  # batches whose spans a client has not made yet; beyond that the oldest are dropped
CHANNEL_CLOSE_MS = 2_000  # that a closing client waits for gRPC to end its calls
SPANS_CLOSE_MS = 1_000  # that a closing client waits for its spans
SPANS_QUEUED_MAX = 4096  # of a node, not sent to its collector; beyond that the oldest are dropped
SPANS_SENT_MAX = 512  # in one message to it
SPANS_SEND_MS = 1_000  # from the first span to the sending of a message
SPANS_SEND_TIMEOUT_MS = 5_000  # of one message, including retries
SPANS_STOP_MS = 1_500  # that a stopping node waits for its collector
SPAN_GROUPS_MAX = 8  # of blocks of one put that landed together, reported one by one
TRACEPARENT_BYTES_MAX = 128

LOOKUPS_MAX = 16_384  # look-ups that a node remembers, of all tenants
LOOKUPS_BYTES_MAX = 8 << 20  # of these in memory, in their form in the log
LOOKUPS_LISTED_MAX = 256  # in one answer
LOOKUP_RUNS_MAX = 64  # of one look-up; further ones are merged into one
LOOKUP_BLOCKS_MAX = (1 << 32) - 1  # of a run; callers report any number
LOOKUP_MISSES_EXPLAINED_MAX = 128  # blocks of one look-up for which the reason of a removal is searched
LOOKUP_ID_BYTES_MAX = 128
LOOKUP_DETAIL_BYTES_MAX = 96
LOOKUP_SLOW_MS = 1.0  # from which advice is given
LOOKUP_LOG_FILES = 4
LOOKUP_LOG_FILE_BYTES_MAX = 4 << 20
LOOKUP_LOG_WAITING_BYTES_MAX = 1 << 20  # not written yet; further ones are never written
LOOKUPS_WAITING_MAX = 32  # that did not reach the node and wait in a client to be reported
LOOKUPS_REPORTED_BYTES_MAX = 1024  # of these with one call
LOOKUP_REPORTED_LATE_MS = 86_400_000  # from such a look-up to its report
LEASES_OVER_REMEMBERED = 4096  # blocks whose lease was over before they landed

EVICTION_BATCH_BLOCKS = 256  # evicted by one plan while no put waits
EVICTION_URGENT_BLOCKS = BATCH_BLOCKS_MAX  # evicted by one plan while a put waits
EVICTION_LOW_PAGES_MAX = (1 << 30) // PAGE_BYTES  # free pages below which a drive evicts in advance
EVICTION_SESSIONS_AT_ONCE = 64  # of a block, looked up at a time
EVICTION_EXPIRED_AT_ONCE = 1024  # blocks that one plan removes because their time is over
EVICTION_HOLES_TRIED = 8  # the longest holes, around which a clearing is looked for first
EVICTION_STEPS_MAX = 4096  # entries that one plan examines: some milliseconds
EVICTIONS_REMEMBERED = 16_384  # with their reasons
EVICTION_GHOSTS_MAX = 1 << 20  # names of evicted blocks that S3-FIFO remembers
TIMER_TICK_MS = 100  # blocks expire at most this late
TIMER_TICK_IDLE_MS = 2_000  # while nothing can expire
IDLE_TICKS = 20  # without work, until a node is idle
ROOM_WAIT_MS_MAX = 2_000  # that a put waits for guards to end, when everything evictable has one
GUARDS_OF_A_KIND_MAX = 1 << 15  # on one block
PROTECTED_SESSIONS_MAX = 4096
PROTECTED_SESSIONS_OF_TENANT_MAX = 512
SESSION_LINKS_PER_BLOCK = 4  # on average: sessions that a block is in
SESSION_LINKS_MIN = 1 << 17  # but a store of few blocks may share more

GRPC_TRANSFERS_AT_ONCE = 8  # batches of one client without a fabric
GRPC_AGAIN_MS_MIN = 10  # before a node that was too busy for a block is called again, twice as long each time
GRPC_AGAIN_MS_MAX = 320
TIMEOUT_S_MAX = 31_536_000  # a caller's own; a longer one is shortened to this
WAIT_SLICE_S = 3600.0  # of a wait without an end, because C takes no longer one
ACK_WORDS = 4096  # of one client: its puts and fetches in flight
ACK_GRACE_MS = 10_000  # from a put's own deadline to its last acknowledgement

OBJECT_BYTES_MAX = 8 << 20  # of an engine's block that is stored as one; a larger one is split by layers
SAVE_BATCH_PAGES_MAX = 256  # of an engine, copied and sent together; at least one block's

SLAB_BYTES = 4 << 20  # for blocks of pieces; a larger block gets its own
SLABS_KEPT = 8  # by a client, for the next
WINDOWS_AHEAD = 3  # of one get in flight at a time, a slab's worth each

INLINE_TIMEOUT_MS = 10_000  # for all bytes of an inline put, or for the client to read one chunk of a get
INLINE_CHUNK_BYTES = 1 << 20  # of blocks sent over gRPC: each message costs Python as much as a copy of it
CHUNK_BYTES_MAX = 4 << 20  # of one that a client sends
MESSAGE_BYTES_MAX = (8 << 20) + (
    64 << 10
)  # gRPC's maximum, large enough that a too large chunk gets our own error
MESSAGE_SMALL_BYTES_MAX = 256 << 10  # of a call that names blocks: twice the size of 1,024 names
MESSAGE_FIELDS_MAX = BATCH_BLOCKS_MAX + 64  # of a message of a stream of blocks: parts, and a few more
PART_FIELDS_MAX = 16  # of such a part
MESSAGES_COMING_MAX = 32  # that the node awaits at a time: they may never be complete
MESSAGE_AHEAD_BYTES = 64 << 10  # of a message that it does not await yet
HTTP_CONNECTIONS_MAX = 256  # at a time
HTTP_CONNECTIONS_OF_SOURCE_MAX = 16
HTTP_BACKLOG = 1024  # connections not accepted yet: beyond these the kernel drops a probe's first packet
HEALTH_STILL_MS = 30_000  # for which the node's thread may be stuck before health reports it
HTTP_REQUEST_BYTES_MAX = 8 << 10  # its line and its headers
ACCEPT_AGAIN_MS = 100  # after --http or the socket for keys failed to accept: the cause may persist
HTTP_TIMEOUT_MS = 5_000  # for a handshake, for a request to arrive, and for an answer to be read
HTTP_REQUESTS_PER_S = 50  # of one tenant, and of all strangers together; health not counted
UI_SESSIONS_MAX = 50  # in one page of the node's web page
UI_TENANTS_MAX = 256  # that an observer can choose from there
UI_MEMBERS_MAX = 64  # of the node's cluster, and as many absent ones
UI_LOOKUPS_MAX = 20  # with a miss, explained there at a time
UI_LOOKUPS_SCANNED_MAX = 1024  # to find these
UI_HISTORY_MS = 10_000  # between two points of its history
UI_HISTORY_POINTS = 181  # half an hour
LOOKUP_LOG_FRAME_BYTES_MAX = 8 << 10  # of one look-up in the log
LOOKUP_LOG_CLOSE_MS = 5_000  # that a stopping node waits for its log of look-ups
HTTP_FIELDS_MAX = 8  # of a query
STOP_GRACE_MS = 1_000  # for calls to end when a node stops
STALE_DEADLINES_MAX = 1024  # replaced ones, in addition to as many as there are valid ones
READS_OF_BLOCK_MAX = 3  # twice the whole block, then only its header
INDEX_TABLES_MAX = 64  # that a copy may have
INDEX_ROWS_COPIED_AT_ONCE = 65_536  # into a new file, by one transaction
INDEX_READ_BYTES = 4 << 20  # of its file, read or overwritten at a time
INDEX_COPY_SPARE_BYTES = 1 << 20  # of address space, besides twice the file that is copied
INDEX_MAP_BYTES_MIN = 64 << 20  # address space of the smallest drive's index
INDEX_ROWS_AT_ONCE = 32_768  # that are read as an array
INDEX_PAGES_CHECKED_AT_ONCE = 1024
LMDB_KEY_BYTES_MAX = 511  # of its format
VARINT_BYTES_MAX = 10  # of protobuf's
DOUBTS_LISTED_AT_ONCE = 1 << 16  # rows of doubted blocks
INDEX_LABELS_AT_ONCE = 1024  # sealed in one transaction
INDEX_LABELS_KEYS_S = 60  # for the next key that seals them
INDEX_GROWTHS_MAX = 4  # doublings of the map within one transaction
READS_AHEAD_MAX = 32  # of one scan of a drive
EVICTION_USES_MAX = 3  # of a block that S3-FIFO counts
CLUSTER_MAP_AGAIN_MS = 50  # before members with different maps are called again
CLUSTER_AHEAD_LOOK_MS = 100  # between looks at puts that wait for their flag: is their owner still the owner?
CLUSTER_AHEAD_AGAIN_MS = 500  # before a put is tried again whose owner could not be reached
CLUSTER_PUTS_SLICE_MS = 20  # of a wait for one node's puts, before those of the others are checked
IMPORT_UNFINISHED_MS = 600_000  # after which an interrupted import expires
REPORTS_SLICE_MS = 100  # of a wait for reports, before deadlines are checked
OWN_ADDRESS_PROBE_MS = 2_000  # that a client waits for its first word to arrive
FABRIC_GRACE_MS = 1_000  # by which the fabric's thread may report a deadline late
LOOKUP_RUNS_REPORTED_MAX = 8  # of a look-up that a client reports
ENGINE_SLOTS_MIN = 16  # of one engine's client
ENGINE_SLOTS_BYTES = 64 << 20  # of the node's memory for puts of one engine
ENGINE_HALF_BYTES_MIN = 2 << 20  # of a load, which two threads then make,
ENGINE_HALVES = 2  # for so many loads at a time
ENGINE_MOVE_MS = 30_000  # for the blocks of one session of transformers
ENGINE_DEVICE_COPY_MS = 10_000  # for a device to copy blocks between its memory and the host's
ENGINE_DEVICE_POLL_MS = 1  # between two polls of such copies
ENGINE_DEVICE_CLOSE_MS = 10_000  # for a device to end its work before its memory is released
ENGINE_MOVING_BYTES = 64 << 20  # of transformers' blocks in flight, unless one block is larger
ENGINE_SLOTS_MAX = 64  # of one session of transformers
LMCACHE_THREADS = 4  # of one connector
LMCACHE_TASKS_MAX = 1024  # of one kind, waiting; further ones fail at once
LMCACHE_FORMATS_MAX = 64  # known at a time
LMCACHE_LOCK_MS = 60_000  # that LMCache's lock of a block is held
SGLANG_REMEMBERED_MAX = 1 << 18  # keys that `clear` can delete
SGLANG_CALLS_MAX = 1024  # whose times are kept until the engine reads them
DEVICE_PAGE_RUNS_MAX = 64  # pieces of a layer's page of a block in a device's memory
VLLM_DEVICE_COPY_MS = 10_000  # for a step to be computed on the device and its blocks to be copied out
VLLM_DEVICE_WINDOWS = 4  # of page-locked memory for loads, a slab each
VLLM_DEVICE_POLL_MS = 1  # between two polls of a device's copy
VLLM_ACK_MS = 10_000  # for the drive's acknowledgement of landed blocks
VLLM_ACK_SLICE_MS = 20  # of a wait for that, unless there is more to send
VLLM_SLOTS_BYTES = 256 << 20  # of the node's memory for one worker's puts
VLLM_SHUTDOWN_MS = 10_000  # for transfers to end, once the client is closed
VLLM_ABSENT_MAX = 65_536  # keys that the node did not have a moment ago
VLLM_ABSENT_NS = 1_000_000_000  # for which these are not requested again
VLLM_QUEUED_MAX = 4096  # keys that wait for a look-up
VLLM_QUEUED_AT_ONCE = 256  # of these, looked up or fetched by one call
VLLM_LOOKUP_THREADS = 2
VLLM_LOOKUP_TRIES = 8  # shorter lengths tried where a window has gaps
VLLM_LOAD_THREADS = 2  # so that requests' loads don't wait for each other
VLLM_TIER_STORING_PART = 4  # one part in this many of the pool may wait to be stored: eviction is delayed
VLLM_TURNS_QUEUED_MAX = 256  # that wait for the node; while it is down further ones are not appended
VLLM_TURN_TRIES = 5  # because a turn's last blocks may still be on their way to the drive
VLLM_TURN_AGAIN_MS = 100  # between two tries
VLLM_SAVING_MAX = 65_536  # blocks that are being saved
VLLM_STEP_LOAD_BYTES = 64 << 20  # of one rank's blocks in shared memory, for which a step may wait,
VLLM_STEP_LOAD_MS = 200  # and for how long; copying them takes milliseconds
VLLM_TIER_STEP_MS = 20  # for which an idle engine's step waits for a tier; then it goes on beside steps
VLLM_LOADING_WAIT_S = 0.005  # of an idle thread, between two looks for work
VLLM_SAVING_WAIT_S = 0.002
VLLM_LOOKUP_FIRST_WAIT_S = 0.01  # a look-up takes 1 or 2 ms, while the engine's scheduler would spin
VLLM_LOOKUP_NEXT_WAIT_S = 0.001
VLLM_ATTACH_MS = 1_000  # between a scheduler's attempts to attach, so that its look-ups go over the fabric
VLLM_WEIGHTS_HASHED_BYTES_MAX = 256 << 20  # of a model's folder, for its name
VLLM_WEIGHTS_CACHED = 256  # such names
BREAKER_LATE_MS = 500  # without any answer, after which a node counts as down
BREAKER_MS_MIN = 50  # for which a client doesn't call a node that was down, twice as long each time
BREAKER_MS_MAX = 5_000
STATUS_AGAIN_MS = 50  # between two attempts to reach an awaited node
CONTACT_HURRIED_MS = 250  # of each step of a check of a node, made after a call has failed
INPUT_FILE_BYTES_MAX = 16 << 20  # that an option or a setting names: certificates, tenants, rules, settings
PORT_MAX = 65_535
HOST_LABEL_CHARACTERS_MAX = 63  # between the dots of a host's name
TOKEN_CHARACTERS_MAX = 4096
DIGITS_MAX = 18  # of a number in a setting
SIZE_BYTES_MAX = (1 << 63) - 1  # that a setting can have
CLOCK_TRIES = 4  # to read two clocks at the same moment,
CLOCK_CLOSE_NS = 2_000  # or this close together
CERTIFICATE_DAYS_MAX = 3650
OPENSSL_TIMEOUT_S = 60
WATCH_S_MAX = 86_400.0  # of the command `watch`
TOP_INTERVAL_S_MIN, TOP_INTERVAL_S_MAX = 0.1, 3600.0  # of the command `top`
DRAIN_LOOK_S = 0.5  # between two lines about the progress of a drain
PROBE_TIMEOUT_S = 5.0  # of `doctor`'s measurement of a drive, each way; a slow one is measured on less
LOG_LINES_PER_S = 20  # of one kind of message
LOG_KINDS_MAX = 1024
RPC_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 5_000  # enough for two lost packets when a connection begins
READINESS_RETRY_MS = 5_000  # between two tries of a node to reach itself
FETCH_TIMEOUT_MS = 30_000
REACH_TIMEOUT_MS_MAX = 600_000  # that a client can be configured to wait for its node
FETCH_CANCEL_MS = 900  # for a node to confirm a get's cancellation; otherwise the link is closed
KEEPALIVE_MS = 5_000  # between two pings on a quiet connection, and for the answer to each

assert HEADER_BYTES % PAGE_BYTES == 0
assert BLOCK_BYTES_MIN <= PAGE_BYTES <= BLOCK_BYTES_MAX
assert BLOCK_BYTES_MAX + HEADER_BYTES <= HOT_BYTES_MIN <= HOT_BYTES_DEFAULT
assert BLOCK_BYTES_MAX + HEADER_BYTES < 1 << 32  # lengths are 32-bit in the record and in libfabric's work
assert DRIVES_MAX * GENERATIONS_PER_DRIVE == GENERATION_MAX + 1
assert DRIVE_QUEUE_DEPTH >= DRIVE_INFLIGHT_OPS_MIN
assert DRIVE_INFLIGHT_READ_BYTES_MAX <= DRIVE_INFLIGHT_BYTES_MAX
assert STORE_QUEUED_MAX >= BATCH_BLOCKS_MAX
assert CHECK_PIECE_BYTES % PAGE_BYTES == 0 == SCRUB_PIECE_BYTES % PAGE_BYTES
assert CHECKS_AT_ONCE * CHECK_PIECE_BYTES <= DRIVE_INFLIGHT_READ_BYTES_MAX
assert PREFETCH_AHEAD_BYTES <= DRIVE_INFLIGHT_READ_BYTES_MAX
assert RESUME_BATCH_BLOCKS <= BATCH_BLOCKS_MAX
assert (
    STEPS_REPORTED_MAX * (STEP_DETAIL_BYTES_MAX + 64) < 6 << 10
)  # gRPC accepts 8 KiB of headers, which include others
assert LOOKUPS_REPORTED_BYTES_MAX + LOOKUP_ID_BYTES_MAX < 2 << 10
assert (
    LOOKUP_LOG_FILE_BYTES_MAX * (LOOKUP_LOG_FILES - 1) >= LOOKUPS_BYTES_MAX
)  # all look-ups in memory are in the log
assert STEPS_REPORTED_MAX <= TRACE_STEPS_MAX
assert SPANS_SENT_MAX <= SPANS_QUEUED_MAX
assert PROTECTED_SESSIONS_OF_TENANT_MAX <= PROTECTED_SESSIONS_MAX
assert EVICTION_BATCH_BLOCKS <= EVICTION_URGENT_BLOCKS <= EVICTION_STEPS_MAX
assert GUARDS_OF_A_KIND_MAX + PROTECTED_SESSIONS_MAX < 1 << 16  # counted in 16 bits
assert SESSION_BLOCKS_MAX <= SESSION_LINKS_MIN < 1 << 32  # positions and links have 32 bits each
assert DELETES_QUEUED_MAX >= BATCH_BLOCKS_MAX
assert SESSION_CHUNK_BLOCKS * KEY_BYTES <= PAGE_BYTES
assert DRIVE_CAPACITY_BYTES_MIN <= DRIVE_CAPACITY_BYTES_DEFAULT <= DRIVE_CAPACITY_BYTES_MAX
assert INLINE_CHUNK_BYTES < 4 << 20  # the default maximum of a message in a gRPC client
assert INLINE_CHUNK_BYTES <= CHUNK_BYTES_MAX < MESSAGE_BYTES_MAX
assert LEASE_TIMEOUT_MS <= LEASE_TIMEOUT_MS_MAX
assert FETCH_CANCEL_MS < ARRIVAL_GRACE_MS < RPC_TIMEOUT_MS
assert PIN_TIMEOUT_MS <= PIN_TIMEOUT_MS_MAX
assert BATCH_BLOCKS_MAX >= SLOTS_PER_CLIENT_MAX
assert LANDING_BYTES_MAX >= BLOCK_BYTES_MAX + HEADER_BYTES
assert CONNECT_TIMEOUT_MS < RPC_TIMEOUT_MS
assert UPKEEP_OFFERED_BLOCKS * BLOCK_BYTES_MAX * 1000 // UPKEEP_BYTES_PER_S < UPKEEP_WAITED_MS
assert (
    CLUSTER_CONFIRM_MS + ETCD_CALL_MS < SESSIONS_KNOWN_MS < 0.9 * SESSIONS_TAKING_MS
)  # clocks' speeds differ
assert max(LEASE_TIMEOUT_MS_MAX, REACH_TIMEOUT_MS_MAX) + ACK_GRACE_MS < CLUSTER_LEFT_MS
assert UPKEEP_ASKED_BLOCKS <= BATCH_BLOCKS_MAX
assert GUARD_HANDSHAKE_MS + GUARD_FIRST_MESSAGE_MS <= GUARD_TIMEOUT_MS
assert 5 * GUARD_BARRED_SOURCES_MAX + 16 < 1 << 12
