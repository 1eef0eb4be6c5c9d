"""Every bound of the service, with the relations between them asserted at import.

Nothing in this project grows without one of these. Names end in their unit.
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

BLOCK_BYTES_MIN = 1
BLOCK_BYTES_MAX = 64 << 20
BATCH_BLOCKS_MAX = 1024  # blocks named in one call
GET_BLOCKS_MAX = 1 << 17  # in one get, which makes calls of them: 1 M tokens are 65,536 blocks of 16
BATCH_PUTS_AHEAD = 64  # blocks of a stream that wait for the drive
BATCH_ENDS_UNREAD_MAX = 8192  # results of a stream that its client has not read; then it takes no more blocks
BATCH_READS_AHEAD = 8  # blocks of a stream that are read while others are sent
LAYERS_MAX = 4096  # of a model
RESUME_BATCH_BLOCKS = 128  # of a session are asked for at a time
RESUME_AHEAD_BATCHES = 2  # of them are under way at a time
RESHARD_SCRATCH_BYTES = 64 << 20  # in which stored shards come together; one block's worth at least

PREFIX_STEP_BLOCKS = 128  # of a prefix that lies on several drives are looked up at a time

SESSION_CHUNK_BLOCKS = (
    126  # keys in one chunk of a manifest: what fits into one page, of the drive and of LMDB
)
SESSION_CHUNKS_MAX = 528  # 66,528 blocks: 1 M tokens in blocks of 16, and some
SESSION_BLOCKS_MAX = SESSION_CHUNK_BLOCKS * SESSION_CHUNKS_MAX  # of one session
SESSION_TIME_TO_LIVE_MS_MAX = 100 * 365 * 86_400_000  # of one that is to end by itself
SESSION_TURNS_MAX = 1024  # of one session: its table of them is written anew with each
SESSION_TURNS_CACHED = 16  # such tables, the last that were read
SESSION_TURN_TOKENS_MAX = (1 << 32) - 1  # of one turn
SESSION_LABEL_BYTES_MAX = 128  # what a session is called, in UTF-8
SESSIONS_EXPIRED_AT_ONCE = (
    2  # between two looks at other work: the beginning of a long one takes a millisecond
)
SESSION_STEP_BLOCKS = 2048  # of one are read at a time; a change of more is a long one
SESSION_SLICE_BLOCKS = 2 * SESSION_CHUNK_BLOCKS  # of one are changed at a time
SESSION_DROP_BLOCKS = 32  # of one are deleted at a time
SESSIONS_SHARE = 2  # one part in so many of a drive may be records of sessions
SESSIONS_LISTED_STEP = 1  # of a list are read at a time: a long one takes a millisecond
SESSIONS_LISTED_MAX = 256  # in one page of a list

CLIENTS_MAX = 4096  # attached to a node; its descriptors and ports may be fewer
DESCRIPTORS_KEPT = 256  # for drives, listeners and callers that have not attached
DESCRIPTORS_OF_CLIENT = 4  # its endpoint, what it is connected by, and its calls
# Each attachment has its own port at the node; beyond loopback one of these, unless others are configured.
FABRIC_PORT_FIRST = 7071
FABRIC_PORT_LAST = 7199
# A source is an IPv4 address, or the /64 of an IPv6 one.
DOOR_LOOK_MS = 100  # between two checks of the connections at the node's ports
HEAP_GROWN_BYTES_MAX = 32 << 20  # between two checks, after which a node collects unused objects
HEAP_FREE_BYTES_MAX = 16 << 20  # that a node's malloc keeps for long
HEAP_LOOK_MS = 5_000
SHARE_CALL_MS = 1_000  # to show a pass for the hot memory, and to be given it
SHARE_CALLERS_MAX = 64  # who are listened to for that at a time
SHARE_PASS_BYTES = 16
SHARE_PASS_MS = 10_000  # a pass that was not shown by then is void
SHARE_REST_MS = 200  # without a descriptor for a caller, until it is asked for one again
SHARE_SLOTS_MAX = 256  # connections whose clients have their slots mapped, or may: three descriptors each
DOOR_GLANCE_MS = 500  # between two checks for new connections, while all known ones are authenticated
DOOR_LOOK_IDLE_MS = 2_000  # between two looks meanwhile: a library may be late to accept
DOOR_HANDSHAKE_MS = 5_000  # of TLS and HTTP/2
DOOR_FIRST_MESSAGE_MS = 5_000  # from a call's beginning to its first message
DOOR_TIMEOUT_MS = 10_000  # of a connection over which no call was let in
DOOR_ANSWER_BYTES_MIN = 4 << 10  # that one counts for, with its call
DOOR_ANSWERS_BYTES_MAX = 64 << 20  # of calls that have one, and whose callers have not taken it
METADATA_MAX = 64  # entries of one call; gRPC bounds them only for a peer that keeps to its settings
DOOR_STREAMS_MAX = 256  # calls under way over one connection of gRPC
DOOR_UNPROVED_OF_SOURCE_MAX = 64  # connections over which no call was let in
DOOR_CONNECTIONS_OF_SOURCE_MAX = 1024
DOOR_FABRIC_CONNECTIONS_OF_CLIENT_MAX = 4  # to its endpoint; a provider makes one or two
DOOR_WINDOW_MS = 2_000
DOOR_KNOCKS_OF_SOURCE_MAX = (
    200  # connections begun and calls refused, in that time; a source with more is barred
)
DOOR_UNPROVED_BYTES_MAX = 256 << 10  # that may come over such a connection,
DOOR_UNPROVED_BYTES_MS = 1_000  # and for how long there may be more, as a busy node lets calls in late
DOOR_PRESSES_MAX = 32  # calls of a connection, in that time, that could not wait their turn
DOOR_PRESSES_KEPT_MAX = 4_096  # between two looks
DOOR_KNOCKS_OF_PRESSING = 20  # that such a connection counts for
DOOR_KNOCKS_OF_LOUD = 50  # that such a connection counts for
DOOR_KNOCK_BYTES = 16 << 10  # a new connection over which no call was let in counts once more for so many,
DOOR_KNOCKS_OF_HEAVY = 10  # and so often at most
# Of a source, that belonged to no message which was read: messages that are coming count until they have been.
DOOR_FRAMES_BYTES_S = 4 << 20  # in a second, all the time
DOOR_FRAMES_BYTES_MAX = 32 << 20  # beyond that
DOOR_SEGMENTS_MAX = 256  # of TCP between two glances: what fewer carry isn't looked at so soon
DOOR_CALL_BYTES = 4 << 10  # that a call may bring beside its messages: its headers, above all
DOOR_MESSAGE_BYTES = 64  # and a message
DOOR_MESSAGE_SHARE = 16  # beside one part in so many of it: frames, and TLS
DOOR_BARRED_MS = 10_000
DOOR_BARRED_SOURCES_MAX = 512  # the kernel takes filters of 4096 instructions, and one of IPv6 needs 5
CALLS_BEGUN_MAX = 4  # at a time, of a node with one tenant; of several tenants, one call of each
CALLS_WAIT_MS = (
    1  # between two looks at a begun call: one that waits for the same thing at both is not counted any more
)
CALLS_BEGUN_LOOKS_MAX = 100  # after which it is not counted in any case
CALLS_PENDING_MAX = (
    6_144  # in gRPC, not taken on yet, about 14 KiB each; calls that were reset are among them
)
CALLS_LINE_LONG = 128  # calls of a tenant that wait; one with more
CALLS_REST_MS = 2  # leaves so much to others between two of its calls, while they call
CALLS_WORK_US = 300  # a call that had the thread for longer
CALLS_REST = 1  # leaves so many times as much to others before its tenant's next one, while they call
CALLS_OUTSIDE_MAX = 8_192  # calls that wait to be begun
OPEN_CALLS_MAX = 16_384  # streams of a node, attached clients among them
CLUSTER_LEASE_S = 5  # how long a member may say nothing
CLUSTER_CONFIRM_MS = 1_000  # between two times that a node asks whether its list of members is the latest
SESSIONS_KNOWN_MS = 4_000  # after it was the latest, a node orders sessions by it for so long
SESSIONS_TAKING_MS = 5_000  # a node is a user's home for so long before it orders what another has ordered
SESSIONS_LAST_TRY_MS = 500  # a client has so much of its time left, or doesn't ask again
SESSIONS_RETRY_MS = 100  # until a client asks again a node that does not order a user's sessions yet
CLUSTER_KEEP_MS = 1_500  # between two times it says something
CLUSTER_RETRY_MS = 500  # until etcd is asked again after it was away
CLUSTER_WEIGHT_MAX = 1 << 20  # of a member
ASYNC_CALLS_MAX = 64  # of one client for asyncio, at a time: each is a thread
CLUSTER_CALLS_AT_ONCE = 32  # of one client, to its nodes
CLUSTER_FIRST_TRY_MS = 1_000  # of a get, until a block's second owner is asked
CLUSTER_LAST_COPY_MS = 200  # that a put waits for its second copy, where one is enough
CLUSTER_LEFT_MS = 900_000  # after it has left the map a node's client is closed
REPLICAS_MAX = 2  # of a block
ZONE_CHARACTERS_MAX = 64  # in a zone's name
REPAIR_BYTES_MAX = 64 << 20  # that a client holds of blocks that are to be put back to their first owners
REPAIR_CALL_MS = 5_000  # of the call that puts one block back
COPY_LATE_MS = 120_000  # for which a client's data may be unacknowledged: a silent connection ends sooner
DELETIONS_KEPT_MAX = 1 << 16  # that a node remembers, so that no copy undoes them
UPKEEP_ASKED_BLOCKS = 256  # of a node's index are looked at, and asked of other owners, at a time
UPKEEP_OFFERED_BLOCKS = 16  # that are announced to an owner together, before their bytes go
UPKEEP_AT_ONCE = 2  # blocks that a node sends to others
UPKEEP_BYTES_PER_S = 32 << 20  # of them
UPKEEP_CALL_MS = 10_000  # of a question, or of one block
UPKEEP_SETTLE_MS = 1_000  # that the map stays as it is before a node looks through its blocks
UPKEEP_RETRY_MS = 5_000  # until it looks again after some could not be copied; twice as long each time
UPKEEP_EVERY_MS = 600_000  # between two looks while the map stays as it is
UPKEEP_WAITED_BLOCKS_MAX = 4096  # that a node waits for, from all others
UPKEEP_WAITED_MS = 60_000  # until it waits no longer
UPKEEP_FREE_SHARE = 32  # one in so many bytes of a node's drives is not filled with copies
UPKEEP_SECRET_BYTES_MIN = 32  # of a cluster's secret
FOLLOW_RETRY_MS = 500  # until a client asks its nodes for the map again, when none has told it
ETCD_CALL_MS = 2_000
ETCD_ENDPOINTS_MAX = 16
ETCD_RELIST_MS = 10_000  # between two looks at the list of members, beside being told of changes
TENANTS_MAX = 4096  # of a node
QUOTA_OWNERS_MAX = TENANTS_MAX  # tenants who have had a quota since the node was started
NODES_MAX = 64  # in one client's list
AUDIT_LINES_PER_S = 100  # of refusals and removals; of more, the audit log has the number only
AUDIT_LINES_OF_ONE_PER_S = 20  # tenant, or host where no tenant is known
AUDIT_NAMES_MAX = 8  # of what was removed at once
WATCHERS_MAX = 256  # of a node
WATCHERS_OF_TENANT_MAX = 8
EVENTS_QUEUED_MAX = 100_000  # blocks whose coming or going waits to be published
EVENTS_REPLAYED_MAX = 10_000  # published messages that a reader can request again
EVENTS_UNREAD_MAX = 10_000  # messages queued for one reader; it can request those that it missed again
WATCH_EVENTS_MAX = 4096  # waiting for one watcher; of further ones it gets the number
WATCH_EVENTS_SENT_MAX = 512  # in one message
WATCH_REST_MS = 20  # between two messages: what happens meanwhile comes in one
WATCH_HEARTBEAT_MS = 5_000
SLOTS_PER_CLIENT_MAX = 1024
GRANTED_SLOTS = 8  # of one client, which it writes into without asking; each is free again once it was read
GRANTED_BYTES_MAX = 2 << 30  # of slots that clients of a node were granted
GRANTED_PUTS = 4096  # of one client that have fired and are not over
ROOMS_MIN = 64  # for blocks that come by grants, given to each client's receiver beforehand
ROOMS_MAX = 4096
LENT_MAX = (
    4  # pieces of ground of a drive that a lane has, or had, and whose records are not all in the index
)
LENT_PAGES = 1 << 16  # of one piece, at most
LENT_SHARE = 64  # and this part of a drive; or, for large records,
LENT_LARGE_RECORDS = 8  # room for so many
LENT_SHARE_OF_LARGE = 16  # and this part of a drive,
LENT_SHARE_OF_FREE = 4  # and of what is free there
LENT_RECORDS_MAX = 1024  # on one piece
LANE_QUOTA_BYTES = 16 << 20  # of a tenant's quota that blocks of one client may take on lanes, unheard of
QUOTA_LENT_SHARE = 32  # of all its clients together at most this part of the quota
LANE_DEPTH = 256  # writes of a lane at a time
LANE_BYTES_MAX = 16 << 20  # of them: what is more takes its turn among the tenants
GRANTED_GATHERED_PAGES_MAX = 65  # of a block that waits for others; a larger one keeps a drive busy by itself
GRANTED_RETRY_MS = 1  # until a drive that had too many writes is offered more
START_PROGRESS_MS = 1_000  # between two lines of a node that is starting
ROOMS_IDLE_TICKS = 10  # a client that has put nothing for so long keeps none
LANDING_AT_ONCE_BYTES = 1 << 20  # of it are had while a reservation waits
LANDING_BYTES_MAX = 4 << 30  # landing memory of all clients of a node together

LEASES_MAX = 32_768  # of a node; its garbage collector looks at each: 10 ms for all
LEASE_TIMEOUT_MS = 30_000
LEASE_TIMEOUT_MS_MAX = 600_000
LEASE_MARGIN_MS = 1_000  # a client gives a put up this long before the node ends its lease
STALLED_MS = 5_000  # a link is ended if nothing of what is pending could be sent for so long, by either side
STALLED_LOOK_MS = 1_000  # between two looks for such
QUARANTINE_TIMEOUT_MS = 5_000  # an expired lease not given back within this ends the connection

PIN_TIMEOUT_MS = 30_000  # of a pin whose owner asked for no time
PIN_TIMEOUT_MS_MAX = 600_000
PINS_MAX = 8192  # of all tenants of a node
PINS_OF_TENANT_MAX = 1024
PINNED_ENDED_AT_ONCE = 1024  # blocks whose pins are over, between two looks at other work

ERASE_TIMEOUT_S = 600.0  # of a call that erases a user or a tenant
ERASED_COPIES_REFUSED_MS = 60_000  # so long a node takes no copies of what it has erased
ERASE_ROUND_MS = (
    45_000  # by then all nodes of a cluster have erased it, or are asked again; the rest is for a copy
)
ERASE_WIPED_BYTES = 4 << 20  # of the free hot memory that an erasure overwrites between other work
ERASE_LOOK_BLOCKS = 128  # entries that an erasure looks at between other work
ERASE_STEP_BLOCKS = 1024  # that it deletes together
ERASE_WAIT_MS = 10_000  # for room in the audit log, before it begins
ERASE_WAIT_LOOK_MS = 100  # between two looks for it
ERASURES_WAITING_MAX = 100  # of a tenant, for that: five seconds of its lines
ERASE_LOOKS_MAX = 4  # at a session's blocks before it is removed: clients may add some meanwhile
VAULT_KEYS_MAX = 1 << 14  # unwrapped keys in locked memory: 1.5 MiB of the 8 MiB that a process may lock
VAULT_NAMES_MAX = 1 << 16  # domains whose keys are known without a look into the keyring
MASTER_COMMAND_MS = 10_000  # for a command that prints the master key
MASTER_FILE_BYTES_MAX = 66  # 64 hexadecimal digits and the end of their line
MASTER_ID_BYTES_MAX = 64
MASTER_WRAPPED_BYTES_MAX = 180  # of a key, as a master key's service gives it
VAULT_CALL_MS = 5_000  # for Vault to answer, from looking up its name to the last byte
VAULT_ANSWER_BYTES_MAX = 64 << 10
CONTROL_CALLERS_MAX = 4  # of a node's socket for its keys
CONTROL_LINE_BYTES_MAX = 4096  # of what one of them says
CONTROL_ASK_MS = 10_000  # in which it has to say it; it may ask Vault before
CONTROL_CALL_MS = 600_000  # for a rotation: a keyring of 4,194,304 keys takes five minutes
KEYRING_SLOTS_MAX = 1 << 22  # keys of a store: 512 MiB
KEYRING_TENANT_KEYS_MAX = 3 << 20  # of them a tenant has so many at most: the others need some too
KEYRING_STEP_PAGES_MAX = 256  # that a keyring grows by
KEYRING_DAMAGED_TOLD_MAX = 1024  # damaged slots that are named in the log, each once
KEYRING_STRAYS_MAX = 64  # moved slots whose own places are looked for; others count as unreadable
KEYRING_LOAD_PAGES = 1024  # of it are read at a time
KEYRING_PAGES_AT_ONCE = 64  # of it are written at a time
KEYRING_SLOTS_TRIED_AT_ONCE = 1 << 15  # with one key
KEYRING_ROTATED_AT_ONCE = 1024  # keys of a tenant, between two moments at which others may change the keyring
KEYRING_TENANTS_UNSEALED_MAX = 1024  # tenants' keys that are kept unsealed
KEYRING_NEW_NAMES_MAX = 1 << 16  # found by a dictionary, until they are sorted in with the others
RECEIPT_KEYS_MAX = 64  # that a receipt names; it counts the others, and has a digest of all

DRIVES_MAX = 32  # of one store
GENERATIONS_RESERVED_AT_ONCE = 1 << 30  # by one write of the superblock
GENERATIONS_PER_DRIVE = (GENERATION_MAX + 1) // DRIVES_MAX  # so that no two drives give the same one

DRIVE_CAPACITY_BYTES_MIN = 16 << 20
DRIVE_CAPACITY_BYTES_MAX = 16 << 40  # its roll, a bit a page, is made in memory: 512 MiB
DRIVE_CAPACITY_BYTES_DEFAULT = 1 << 30  # of a drive file without a given size
DRIVE_QUEUE_DEPTH = 256
DRIVE_INFLIGHT_BYTES_MAX = 32 << 20
DRIVE_INFLIGHT_READ_BYTES_MAX = 8 << 20  # a reader has half of it at the drive, and copies the rest
FETCHES_A_ROUND = 64  # are begun, and then others have the thread
FABRIC_CALLS_MS = 1  # of them in one round of the thread: each tenant's turn is one call
FABRIC_WORK_US = 500  # a tenant for which so much was done at a stretch rests while others call,
FABRIC_REST = 3  # so many times as long
FETCHES_QUEUED_MAX = 16 * BATCH_BLOCKS_MAX
STAGED_IDLE_BYTES_MAX = 64 << 20  # memory for encrypted records that is kept for the next ones
WIPES_AT_ONCE = 64  # headers that are overwritten together, in as many operations
DRIVE_INFLIGHT_OPS_MIN = 2  # but blocks larger than half of it still overlap
STORE_QUEUED_MAX = 4 * BATCH_BLOCKS_MAX  # puts, and as many gets, that a drive has accepted and not answered
DELETES_QUEUED_MAX = 4 * BATCH_BLOCKS_MAX  # deletes that a drive has accepted and not answered
SESSIONS_QUEUED_MAX = 1024  # changes of sessions that it has accepted and not answered
CHECKS_AT_ONCE = 4  # records of a drive that are read and checked because a put is to be settled with them
CHECK_PIECE_BYTES = 1 << 20  # of such a record is read at a time
ENCRYPT_PIECE_BYTES = 1 << 20  # of what was stored in the clear is read, or overwritten, at a time
ENCRYPT_STRETCH_BYTES = 16 << 20  # of it at a stretch, which one block may exceed
ENCRYPT_SHARE = 4  # one part in this many of the time is spent on it
ENCRYPT_REST_MS = 100  # after a stretch, however short it was
ENCRYPT_LOOKED_AT_ONCE = 1024  # rows of the index
SCRUB_PIECE_BYTES = 256 << 10  # of a quarantined extent is overwritten at a time, one at a time
UNSYNCED_FREES_MAX = 256  # records replaced by others that are not synced; more of them bring a sync about
ZERO_FILL_BYTES_MAX = 2 << 30  # a larger drive is not filled with zeros when it is formatted
INDEX_HEADERS_CHECKED_MAX = (
    1024  # records held against an index that was not closed; reading all would be a scan
)
FREE_HEADERS_CHECKED_MAX = 256  # free extents, and the oldest records, that are looked at then as well
SCAN_UNREADABLE_PAGES_MAX = 1024  # a drive with more of them is not recovered but reported
HOT_BYTES_DEFAULT = 256 << 20  # memory that reads go through on their way to a client, and stay in
HOT_BYTES_MIN = 128 << 20
COLD_BYTES_MAX = 16 << 20  # of blocks that the C core reads by itself at a time, and of the rooms for them,
COLD_SHARE = 16  # and at most this part of the hot memory
SHARES = 8  # a caller that receives nothing may hold one part in so many of the hot memory
TURN_BYTES = 1 << 20  # of one tenant, before it is the next one's turn
SEND_BYTES_MAX = 2 << 20  # of payloads that a reader is handed together, unless one is larger
TURN_STEP_BLOCKS = 16  # of a call that names many: up to a millisecond, if they are deleted
SLOTS_A_STEP = 64  # of a call that leases or gives back many: a millisecond or two
TURN_STEP_PUTS = 8  # of a stream that puts many: a millisecond, if others have to be evicted for them
TURNS_OTHERS_MS = 1_000  # a tenant that called within this is there
MOVING_MAX = 2  # blocks of a tenant over gRPC at a time, while others call;
MOVING_MS = 250  # of one that takes longer the place is given to the next
READ_AHEAD_BYTES = 20 << 20  # read for fetches at a time: a later caller waits behind this much at most

PREFETCHES_MAX = 64  # sessions that wait to be read into the hot memory; one tenant's are an eighth of them
PREFETCH_BLOCKS_MAX = 8192  # of one session
PREFETCH_AHEAD_BYTES = 2 << 20  # asked of the drive for prefetches, while no fetch waits

GET_THREADS = 4  # of a compute node: gets of arrivals that nodes are taking at a time
PREFETCH_THREADS = 4  # of a compute node: prefetches that wait for their nodes at a time
ARRIVAL_GRACE_MS = 1_000  # from the deadline of a request's gets to that of the request
TRANSFERS_TOLD_MAX = (
    65_536  # that the requester's catalogue has not taken in; of more, the oldest are not known
)
SESSIONS_FOLLOWED_MAX = 1024  # whose transfers a compute node's catalogue follows
LEARNT_SESSIONS_MAX = 64  # of one user, the latest, are looked up when nothing is known of them

PUTS_SEEN_MAX = 64  # the last puts, of which a node remembers the times
TRACES_MAX = 1024  # sessions of which a node remembers what it saw
PUTS_TOGETHER_MS = 10  # blocks that come so soon after others are one row of them, and one step of a trace
PUTS_ROW_MS = 100  # the time that one row covers
TRACE_LOOKED_BACK = 6  # steps of a trace among which one is sought that a block belongs to
TRACE_STEPS_MAX = 128  # of one session: the last turns
TRACE_FLAGS_MAX = 16  # of one session: flags that wait for a row of puts, and rows that wait for flags
STEPS_REPORTED_MAX = 32  # told with one call
STEP_DETAIL_BYTES_MAX = 96
STEP_CLOCK_BYTES = 8
STEP_FIRINGS_MAX = 8  # of one batch of puts, reported one by one
STEP_PUTS_FOLLOWED_MAX = 16  # batches of puts of a session whose end has not been told

SPANS_WAITING_MAX = 1024  # batches whose spans a client has not made yet; of more, the oldest are not traced
CHANNEL_CLOSE_MS = 2_000  # that a closing client waits for gRPC to end its calls
SPANS_CLOSE_MS = 1_000  # that a closing client waits for them
SPANS_QUEUED_MAX = 4096  # of a node, that its collector has not taken; of more, the oldest go
SPANS_SENT_MAX = 512  # in one message to it
SPANS_SEND_MS = 1_000  # after the first of them they are sent
SPANS_SEND_TIMEOUT_MS = 5_000  # of one message, tried again within it
SPANS_STOP_MS = 1_500  # that a stopping node waits for its collector
SPAN_GROUPS_MAX = 8  # of blocks of one put that landed together, reported one by one
TRACEPARENT_BYTES_MAX = 128

LOOKUPS_MAX = 16_384  # look-ups that a node remembers, of all tenants
LOOKUPS_BYTES_MAX = 8 << 20  # of them in memory, as they are in the log
LOOKUPS_LISTED_MAX = 256  # told in one answer
LOOKUP_RUNS_MAX = 64  # of one look-up; further ones are merged into one
LOOKUP_MISSES_EXPLAINED_MAX = (
    128  # blocks of one look-up of which is found out how they went, if they are gone
)
LOOKUP_ID_BYTES_MAX = 128
LOOKUP_DETAIL_BYTES_MAX = 96
LOOKUP_LOG_FILES = 4
LOOKUP_LOG_FILE_BYTES_MAX = 4 << 20
LOOKUP_LOG_WAITING_BYTES_MAX = 1 << 20  # not written yet; more of them are not written at all
LOOKUPS_WAITING_MAX = 32  # that did not reach the node and wait in a client to be told
LOOKUPS_TOLD_BYTES_MAX = 1024  # of them with one call
LOOKUP_TOLD_LATE_MS = 86_400_000  # at most, after it
LEASES_OVER_REMEMBERED = 4096  # blocks whose lease was over before they landed

EVICTION_BATCH_BLOCKS = 256  # taken by one plan while no put waits
EVICTION_URGENT_BLOCKS = BATCH_BLOCKS_MAX  # taken by one plan while a put waits
EVICTION_LOW_PAGES_MAX = (1 << 30) // PAGE_BYTES  # below which a drive makes room beforehand
EVICTION_SESSIONS_AT_ONCE = 64  # of a block are looked up
EVICTION_STEPS_MAX = 4096  # entries that one plan looks at: some milliseconds
EVICTIONS_REMEMBERED = 16_384  # whose reasons are remembered
EVICTION_GHOSTS_MAX = 1 << 20  # names of evicted blocks that S3-FIFO knows again
TIMER_TICK_MS = 100  # blocks expire at most this late
TIMER_TICK_IDLE_MS = 1_000  # while nothing is to expire
IDLE_TICKS = 20  # without anything to do, until a node is idle
ROOM_WAIT_MS_MAX = 2_000  # that a put waits for the end of guards, when all that could go has one
GUARDS_OF_A_KIND_MAX = 1 << 15  # on one block
PROTECTED_SESSIONS_MAX = 4096
PROTECTED_SESSIONS_OF_TENANT_MAX = 512
SESSION_LINKS_PER_BLOCK = 4  # on average: in how many sessions a block is
SESSION_LINKS_MIN = 1 << 17  # but a store of few blocks may share more

GRPC_TRANSFERS_AT_ONCE = 8  # batches of one client that is without a fabric
GRPC_AGAIN_MS_MIN = (
    10  # until a node that was too busy for one of its blocks is asked again, each time twice as long
)
GRPC_AGAIN_MS_MAX = 320
TIMEOUT_S_MAX = 31_536_000  # a caller's own; a longer one is taken for this
ACK_WORDS = 4096  # of one client: its puts and fetches under way
ACK_GRACE_MS = 10_000  # from a put's own deadline to its last acknowledgement

OBJECT_BYTES_MAX = 8 << 20  # of an engine's block that is stored as one; of a larger one groups of layers are
SAVE_BATCH_PAGES_MAX = 256  # of an engine are copied and sent together; one block's at least

SLAB_BYTES = 4 << 20  # for blocks of pieces; a larger block gets its own
SLABS_KEPT = 8  # by a client, for the next
WINDOWS_AHEAD = 3  # of one get are on their way at a time, a slab's worth each

INLINE_TIMEOUT_MS = 10_000  # for all bytes of an inline put, or for one chunk of a get to be taken
INLINE_CHUNK_BYTES = 256 << 10  # of a block sent over gRPC
CHUNK_BYTES_MAX = 4 << 20  # of one that a client sends
MESSAGE_BYTES_MAX = (8 << 20) + (
    64 << 10
)  # what gRPC takes: a chunk that is too large is refused in our words
MESSAGE_SMALL_BYTES_MAX = 256 << 10  # of a call that names blocks: twice what 1,024 of them take
MESSAGE_FIELDS_MAX = BATCH_BLOCKS_MAX + 64  # of a message of a stream of blocks: parts, and a few more
PART_FIELDS_MAX = 16  # of such a part
MESSAGES_COMING_MAX = 32  # that the node waits for at a time: they may come by halves
MESSAGE_AHEAD_BYTES = 64 << 10  # of a message that it does not wait for yet
HTTP_CONNECTIONS_MAX = 256  # at a time
HTTP_CONNECTIONS_OF_SOURCE_MAX = 16
HTTP_BACKLOG = 1024  # that wait for the server's thread: beyond these the kernel drops a probe's first packet
HEALTH_STILL_MS = 30_000  # for so long the node's thread does nothing before health says so
HTTP_REQUEST_BYTES_MAX = 8 << 10  # its line and its headers
HTTP_ACCEPT_AGAIN_MS = 100  # after a connection could not be accepted: the cause may persist
HTTP_TIMEOUT_MS = 5_000  # for a handshake, for a request to come, and for an answer to be taken
HTTP_REQUESTS_PER_S = 50  # of one tenant, and of all strangers together; health left out
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
STOP_GRACE_MS = 1_000  # for calls to end in, when a node stops
STALE_DEADLINES_MAX = 1024  # that have been set anew, beside as many as there are good ones
READS_OF_BLOCK_MAX = 3  # twice all of it, then its header alone
INDEX_TABLES_MAX = 64  # that a copy may have
INDEX_ROWS_COPIED_AT_ONCE = 65_536  # into a new file, by one transaction
INDEX_MAP_BYTES_MIN = 64 << 20  # address space of the smallest drive's index
INDEX_PAGES_AT_ONCE = 2048  # whose rows are read as arrays
INDEX_LIVES_LISTED_AT_ONCE = 1 << 16  # rows of blocks with a time to live
DOUBTS_LISTED_AT_ONCE = 1 << 16  # rows of doubted blocks
INDEX_LABELS_AT_ONCE = 1024  # are sealed in one transaction
INDEX_LABELS_KEYS_S = 60  # for the next of the keys that they are sealed with
INDEX_GROWTHS_MAX = 4  # doublings of the map within one transaction
READS_AHEAD_MAX = 32  # of one scan of a drive
EVICTION_USES_MAX = 3  # of a block that S3-FIFO counts
CLUSTER_MAP_AGAIN_MS = 50  # until members that have different maps are asked again
CLUSTER_PUTS_SLICE_MS = 20  # of a wait for one node's puts, until those of the others are looked at
IMPORT_UNFINISHED_MS = 600_000  # after which an import that was cut off ends by itself
REPORTS_SLICE_MS = 100  # of a wait for reports, until deadlines are looked at
OWN_ADDRESS_PROBE_MS = 2_000  # that a client waits for its first word to come through
FABRIC_GRACE_MS = 1_000  # by which the fabric's thread may tell of a deadline late
LOOKUP_RUNS_TOLD_MAX = 8  # of a look-up that a client reports
ENGINE_SLOTS_BYTES = 64 << 20  # of the node's memory for puts of one engine
ENGINE_MOVE_MS = 30_000  # for the blocks of one session of transformers
ENGINE_MOVING_BYTES = 64 << 20  # of transformers' blocks in flight, unless one block is larger
ENGINE_SLOTS_MAX = 64  # of one session of transformers
LMCACHE_TASKS_MAX = 1024  # of a kind that wait; further ones fail at once
LMCACHE_FORMATS_MAX = 64  # known at a time
SGLANG_REMEMBERED_MAX = 1 << 18  # keys that `clear` can delete
SGLANG_CALLS_MAX = 1024  # whose times are kept until the engine reads them
DEVICE_PAGE_RUNS_MAX = 64  # pieces of a layer's page of a block in a device's memory
VLLM_DEVICE_COPY_MS = 10_000  # for a step to be computed on the device and its blocks to be copied out
VLLM_DEVICE_WINDOWS = 4  # of page-locked memory for loads, a slab each
VLLM_DEVICE_POLL_MS = 1  # between two looks at a copy of the device's
VLLM_ACK_MS = 10_000  # for the drive's word about what has landed
VLLM_ACK_SLICE_MS = 20  # of a wait for that word, unless there is more to send
VLLM_SLOTS_BYTES = 256 << 20  # of the node's memory for what one worker sends
VLLM_SHUTDOWN_MS = 10_000  # until transfers have ended, once the client is closed
VLLM_ABSENT_MAX = 65_536  # keys that the node did not have a moment ago
VLLM_QUEUED_MAX = 4096  # keys that wait for a look-up
VLLM_TURNS_QUEUED_MAX = 256  # that wait for the node; while it is away further ones are not appended
VLLM_TURN_TRIES = 5  # since a turn's last blocks may still be on their way to the drive
VLLM_TURN_AGAIN_MS = 100  # between two of them
VLLM_SAVING_MAX = 65_536  # blocks that are being saved
BREAKER_LATE_MS = 500  # for so long a node answers nothing before it counts as away
BREAKER_MS_MIN = 50  # a client leaves a node that was away alone for so long, and twice as long each time
BREAKER_MS_MAX = 5_000
STATUS_AGAIN_MS = 50  # between two attempts to reach a node that is waited for
CONTACT_HURRIED_MS = 250  # of each step towards a node that is looked at beside a call that has failed
LOG_LINES_PER_S = 20  # of one kind of message
LOG_KINDS_MAX = 1024
RPC_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 5_000  # two lost packets of a connection's beginning are made good within it
READINESS_RETRY_MS = 5_000  # between two tries of a node to reach itself
FETCH_TIMEOUT_MS = 30_000
REACH_TIMEOUT_MS_MAX = 600_000  # that a client can be told to wait for its node
FETCH_CANCEL_MS = 900  # for a node to confirm a get's cancellation; otherwise the link is closed
KEEPALIVE_MS = 5_000  # between two pings on a quiet connection, and how long each may be unanswered

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
)  # gRPC takes 8 KiB of headers, and more come along
assert LOOKUPS_TOLD_BYTES_MAX + LOOKUP_ID_BYTES_MAX < 2 << 10
assert (
    LOOKUP_LOG_FILE_BYTES_MAX * (LOOKUP_LOG_FILES - 1) >= LOOKUPS_BYTES_MAX
)  # what is in memory is in the log
assert STEPS_REPORTED_MAX <= TRACE_STEPS_MAX
assert SPANS_SENT_MAX <= SPANS_QUEUED_MAX
assert PROTECTED_SESSIONS_OF_TENANT_MAX <= PROTECTED_SESSIONS_MAX
assert EVICTION_BATCH_BLOCKS <= EVICTION_URGENT_BLOCKS <= EVICTION_STEPS_MAX
assert GUARDS_OF_A_KIND_MAX + PROTECTED_SESSIONS_MAX < 1 << 16  # counted in 16 bits
assert SESSION_BLOCKS_MAX <= SESSION_LINKS_MIN < 1 << 32  # positions and links have 32 bits each
assert DELETES_QUEUED_MAX >= BATCH_BLOCKS_MAX
assert SESSION_CHUNK_BLOCKS * KEY_BYTES <= PAGE_BYTES
assert DRIVE_CAPACITY_BYTES_MIN <= DRIVE_CAPACITY_BYTES_DEFAULT <= DRIVE_CAPACITY_BYTES_MAX
assert INLINE_CHUNK_BYTES < 4 << 20  # the bound of a message in a client of gRPC that sets none
assert INLINE_CHUNK_BYTES <= CHUNK_BYTES_MAX < MESSAGE_BYTES_MAX
assert LEASE_TIMEOUT_MS <= LEASE_TIMEOUT_MS_MAX
assert FETCH_CANCEL_MS < ARRIVAL_GRACE_MS < RPC_TIMEOUT_MS
assert PIN_TIMEOUT_MS <= PIN_TIMEOUT_MS_MAX
assert BATCH_BLOCKS_MAX >= SLOTS_PER_CLIENT_MAX
assert LANDING_BYTES_MAX >= BLOCK_BYTES_MAX + HEADER_BYTES
assert CONNECT_TIMEOUT_MS < RPC_TIMEOUT_MS
assert UPKEEP_OFFERED_BLOCKS * BLOCK_BYTES_MAX * 1000 // UPKEEP_BYTES_PER_S < UPKEEP_WAITED_MS
assert CLUSTER_CONFIRM_MS + ETCD_CALL_MS < SESSIONS_KNOWN_MS
assert SESSIONS_KNOWN_MS < 0.9 * SESSIONS_TAKING_MS  # clocks differ in speed
assert max(LEASE_TIMEOUT_MS_MAX, REACH_TIMEOUT_MS_MAX) + ACK_GRACE_MS < CLUSTER_LEFT_MS
assert UPKEEP_ASKED_BLOCKS <= BATCH_BLOCKS_MAX
assert DOOR_HANDSHAKE_MS + DOOR_FIRST_MESSAGE_MS <= DOOR_TIMEOUT_MS
assert 5 * DOOR_BARRED_SOURCES_MAX + 16 < 1 << 12
