"""Every code that a message can carry, explained: `gangline explain CODE`. Stable: a code keeps its meaning for ever."""

from __future__ import annotations

#: code → (title, what it means, what to do)
CODES: dict[str, tuple[str, str, str]] = {
    # -------------------------------------------------------- job files
    "GL-1001": (
        "the job file cannot be read",
        "It is empty, not UTF-8, or not YAML (JSON where JSON is expected). The place in the message is where the reader gave up.",
        "Look at the line before the place too: an open quote or bracket, or an indent, is often there.",
    ),
    "GL-1002": (
        "too large",
        "A job file has at most 256 KiB, so that every job fits into one log entry.",
        "Put long scripts and data into files.",
    ),
    "GL-1003": (
        "aliases, anchors and tags are refused",
        "They let a small file become an enormous one, or name types of a programming language. A job file needs neither.",
        "Write the value out in each place.",
    ),
    "GL-1004": ("nested too deep", "No job has so many levels.", "Check brackets and indents."),
    "GL-1005": (
        "the same key twice",
        "Readers of YAML and JSON disagree on which of the two counts, so none is taken.",
        "Delete one of them.",
    ),
    "GL-1006": ("not a job", "A job is a mapping of fields; this is a list, a text or a number.", "Begin with `command: [python, train.py]`."),
    "GL-1101": (
        "no such field",
        "The field is unknown. It is refused rather than passed over, because a job that silently ignores a limit is worse than none.",
        "Use the name that the message offers; docs/jobfile.md lists all of them.",
    ),
    "GL-1102": (
        "a value of another type",
        "A number where a text belongs, or the other way round, or a word that YAML readers take for different things (no, 0x10, 12:30:45).",
        "Put texts into quotes; write numbers in plain digits; write true or false.",
    ),
    "GL-1103": (
        "something is missing",
        "A job needs a command, and the command a program; a cluster file needs queues, at least one.",
        "Add `command: [python, train.py]`, or what the message names.",
    ),
    "GL-1104": ("out of bounds", "The value is below or above what the message says is possible.", "Choose one within the bounds."),
    "GL-1105": ("malformed", "A name, duration, size or path is not written as the message says.", "Take the spelling that the message offers."),
    "GL-1106": ("not one of the words", "The field takes one of a few words.", "Take one of those in the message."),
    "GL-1107": (
        "a variable that a job may not set",
        "RANK, WORLD_SIZE, MASTER_ADDR, CUDA_VISIBLE_DEVICES and their like are set for each rank; PATH, LD_PRELOAD and LD_AUDIT change which "
        "code is run.",
        "Leave it out, or set it in the command: [env, NAME=value, program].",
    ),
    "GL-1108": (
        "fields that contradict each other",
        "Each is right by itself, but not both together.",
        "Change one of them as the message says.",
    ),
    "GL-1109": (
        "not in this version",
        "The field is planned and not there yet. It may be null or empty.",
        "Leave it out; the message names another way.",
    ),
    "GL-1110": ("too many or too long", "A list, a mapping or a text is longer than its limit.", "Put it into a file that the command reads."),
    "GL-1111": ("characters that cannot be", "NUL, half a surrogate pair, or control characters in a path.", "Remove them."),
    # -------------------------------------------------------- traces
    "GL-1201": ("the trace cannot be read", "It is not there, not UTF-8, or damaged.", "Look at the file; unpack it if in doubt."),
    "GL-1202": (
        "columns that are needed are not there",
        "The first line of the table names the columns; some that the format needs are missing, or named twice.",
        "Compare the first line with the format in docs/simulate.md.",
    ),
    "GL-1203": (
        "not a row of the table",
        "The line has more or fewer cells than there are columns, or a quote that does not end.",
        "Look at the line; a comma inside a cell needs quotes around the cell.",
    ),
    "GL-1204": ("a cell that cannot be", "The value is of another kind, or out of the bounds that the message says.", "Correct the cell."),
    # -------------------------------------------------------- the command
    "GL-2000": ("internal error", "A fault in gangline itself.", "Run the command with --debug and report what it prints."),
    "GL-2001": (
        "no scheduler answers",
        "None of the addresses accepts connections, or none answers in time. Running jobs do not need schedulers and go on.",
        "Check GANGLINE_URL and the schedulers; `gangline up` starts a local cluster.",
    ),
    "GL-2002": (
        "no scheduler is named",
        "Neither --url nor GANGLINE_URL nor the state directory of a local cluster says where the schedulers are.",
        "export GANGLINE_URL=http://scheduler-1:7070,http://scheduler-2:7070, or `gangline up`.",
    ),
    "GL-2010": ("no such field in the result", "--fields names a field that the result does not have.", "Take those of `-o json`."),
    "GL-2011": ("a file cannot be read", "The job file is missing or not readable.", "Check its name and rights."),
    # -------------------------------------------------------- what schedulers refuse
    "bad_input": ("the request has problems", "The list below the message has all of them.", "Each has its own code."),
    "no_such_job": ("no such job", "No job has this id, the beginning of an id, or this name.", "`gangline ps -a` lists those that there are."),
    "no_such_element": (
        "the array has no such element",
        "Behind the dot of an element's id stands one of the indices of its array.",
        "`gangline show JOB` lists the indices.",
    ),
    "no_such_dependency": (
        "the job to wait for is not known",
        "A job can only wait for jobs that are known: submitted before it, earlier in the same batch, and not forgotten since they ended.",
        "Submit that one first, or leave the dependency out; `gangline ps -a` lists the jobs that are known.",
    ),
    "dependency_twice": (
        "two dependencies on one job",
        "A dependency names a job and one condition; the same job was named twice, perhaps by its id and by its name.",
        "Leave one of them out.",
    ),
    "job_ended": ("the job has ended", "A job that has ended is not started again, so it cannot be held.", "Submit it anew with `hold: true`."),
    "array_held": (
        "its array is held",
        "The element itself is not held, but its array is, and so are all of its elements.",
        "Release the array.",
    ),
    "element_not_live": (
        "the element is not a job",
        "Elements of an array become jobs when their turn comes, and are forgotten some time after they have ended.",
        "Hold or release the array; an element whose turn has not come can be stopped.",
    ),
    "is_array": (
        "an array has no logs of its own",
        "What is printed is printed by its elements.",
        "Name one, as JOB.INDEX; `gangline logs JOB` goes through all that are known.",
    ),
    "no_array": ("the job is no array", "Only arrays have elements.", "Leave --array out, or name an array."),
    "no_such_node": ("no such node", "No node of this name has ever joined.", "`gangline nodes` lists them."),
    "no_such_gpu": ("no such GPU", "The node has none of this index or UUID.", "`gangline health NODE -o wide` shows UUIDs."),
    "not_withdrawn": ("it is in use", "Only what was taken out can be worked on.", "`gangline health NODE --quarantine` takes it out first."),
    "device_in_use": ("a gang still has it", "What is worked on or tested must be empty.", "Quarantine it; its gangs move away."),
    "ambiguous": ("several jobs begin like this", "The beginning of an id fits more than one job.", "Give more of it."),
    "name_in_use": ("the name is in use", "A job of this name has not ended yet.", "Stop it, wait for it, or take another name."),
    "idempotency_key_reused": (
        "the key belongs to another request",
        "A job was submitted with this key and another content; the key makes one job only.",
        "Take a fresh key for a different job.",
    ),
    "unauthorized": (
        "who are you?",
        "The scheduler wants a token, and got none or a wrong one.",
        "Set GANGLINE_TOKEN_FILE to a file with the token.",
    ),
    "wrong_host": (
        "wrong name of the scheduler",
        "The scheduler does not answer for the host in the address.",
        "Start it with --allowed-host NAME.",
    ),
    "no_such_queue": (
        "no such queue",
        "Once queues are declared, a job goes to one of them that has no queues below it.",
        "`gangline queues` lists them; name one by `queue` in the job file.",
    ),
    "no_such_reservation": ("no such reservation", "There is none of this name.", "`gangline reservation list` lists them."),
    "bad_reservation": ("a reservation that makes no sense", "It contradicts itself; the message says how.", "Change what it says."),
    "no_room": (
        "too few GPUs to be kept",
        "Other reservations, and gangs that cannot be moved, have too many of the GPUs at that time.",
        "Ask for fewer, choose another time, or name the nodes.",
    ),
    "no_such_topology": (
        "no such topology or level",
        "Once topologies are declared, a job asks for levels of one of them; `hostname`, the node itself, is a level of each.",
        "`gangline queues --file` shows what is declared; name it by `topology` in the job file.",
    ),
    "queue_drains": (
        "the queue takes no jobs",
        "It, or a queue above it, is declared with `state: drain`: what it has runs out, and nothing new is accepted.",
        "Take another queue, or ask whoever declared it.",
    ),
    "queue_in_use": (
        "the queue has live jobs",
        "A queue whose jobs have not ended cannot be removed, nor get queues below it.",
        "Keep it with `state: drain` until it is empty (`gangline ps --queue NAME`), or stop its jobs.",
    ),
    "queues_changed": (
        "somebody else was faster",
        "The queues were declared anew after the declaration that this change was made from. Nothing was done.",
        "Apply again: the difference is shown from what is declared now.",
    ),
    "bad_queues": (
        "not a tree of queues",
        "A queue is named twice, or before the queue that it is under; or a topology has a level twice.",
        "Send what the message asks for.",
    ),
    "if_match_required": (
        "changed from what?",
        "A declaration replaces all queues and topologies, so it has to name the one that it was made from.",
        "Send the ETag of GET /v1/queues as If-Match; `gangline apply` does.",
    ),
    "node_is_up": ("the node is up", "Only a lost node can be called dead.", "Stop its agent or cut its power first."),
    # -------------------------------------------------------- what else schedulers answer
    "no_such_rank": ("no such rank", "The gang has fewer ranks, or is not placed.", "`gangline show JOB` lists them."),
    "no_such_action": (
        "no such action",
        "Nodes can be cordoned, uncordoned, drained, undrained and confirmed dead; jobs can be held and released.",
        "Take one of these.",
    ),
    "no_such_route": (
        "nothing at this address",
        "The API has no such path; perhaps client and scheduler differ in version.",
        "See docs/api.md.",
    ),
    "not_running": ("the rank does not run", "A command can be run beside a rank only while that runs.", "Look at the job: gangline show JOB."),
    "exec_switched_off": (
        "no commands in ranks",
        "Schedulers and agents run commands in ranks only when both have the same key, --exec-key-file.",
        "Ask whoever runs the cluster; docs/nodes.md says how it is switched on.",
    ),
    "bad_command": ("not a command", "The command has no words, too many, or one that no program can be given.", "Look at the message."),
    "no_log": ("no log yet", "The rank has not printed anything, has not started, or its node has removed the log.", "Try again later."),
    "beyond_the_end": ("behind the end of the log", "The rank has not printed so much.", "Ask for a smaller offset."),
    "agent_unreachable": (
        "the node does not answer",
        "Logs are read from the node that has them, and its agent cannot be reached. What runs there need not be hurt.",
        "`gangline nodes` shows whether it is lost; try again later.",
    ),
    "agent_refused": (
        "the node refuses",
        "The agent of the node did not give the log, or did not run the command.",
        "Look into the agent's own log.",
    ),
    "compacted": (
        "the log begins later",
        "The entry is in the archive and no longer in the store.",
        "Begin with the index that the message names.",
    ),
    "index_in_the_future": ("not written yet", "The log has no entry of this index.", "Ask for a smaller one, or follow with -f."),
    "index_not_reached": (
        "not there in time",
        "The scheduler did not see the entry within the time that was given.",
        "Ask again, or another scheduler.",
    ),
    "no_leader": (
        "nobody leads",
        "No scheduler leads at the moment, so nothing can be changed. Running jobs go on. It was waited for as long as a change takes.",
        "Check that a scheduler runs and that etcd has a majority of its members.",
    ),
    "leader_unreachable": (
        "the leader does not answer",
        "The scheduler that was asked cannot reach the leader.",
        "Try again, or another scheduler.",
    ),
    "outcome_unknown": (
        "perhaps done, perhaps not",
        "The write was sent and its answer was lost. With its idempotency key it can be repeated without harm, which this command has tried.",
        "Look whether it has happened; or repeat it with the same --idempotency-key.",
    ),
    "unavailable": ("not ready", "The scheduler is starting or cannot reach the store.", "Try again."),
    "overloaded": ("too much to do", "More writes wait than the scheduler takes at once.", "Try again later; submit many jobs as one batch."),
    "too_many_connections": ("too many connections", "One client has too many connections open.", "Close some."),
    "too_many_streams": ("too many streams", "Too many logs or event streams are being followed.", "End some of them."),
    "too_often": ("too often", "What was asked for is rationed.", "Wait for the time that the answer names."),
    "too_large": ("too large", "The body is larger than the scheduler takes.", "Split it."),
    "conflict": ("conflict", "The request does not fit what is there now.", "Look at it again."),
    "cross_origin": ("a page of another site", "A page in a browser may only change what it was loaded from.", "Use the command line."),
    "encoded_body": ("compressed body", "Compressed requests are refused.", "Send it plain."),
    "bad_body": ("the body cannot be read", "It was cut off or malformed.", "Send it again."),
    "bad_header": ("a header cannot be", "It is too long or not printable.", "Correct it."),
    "bad_request": ("not HTTP", "The request was malformed.", "Check what sends it."),
    "body_timeout": ("the body came too slowly", "It was not complete in time.", "Send it again."),
    "method_not_allowed": ("not possible here", "The path exists, but not with this method.", "See docs/api.md."),
    "http_error": ("refused", "The request was refused by the HTTP server.", "The message says why."),
    "internal": ("a fault in the scheduler", "It has an error; its own log says where.", "Report it."),
    # -------------------------------------------------------- why a job waits
    "no_nodes": (
        "no node takes new ranks",
        "All nodes are lost, cordoned, draining, or avoided by this job after a failure on them.",
        "`gangline nodes` shows why; `gangline uncordon NODE` opens one.",
    ),
    "no_such_model": (
        "no node has this GPU model",
        "No node that takes new ranks has a GPU of an acceptable model.",
        "`gangline nodes` lists the models; add one to resources.gpu_model, or leave it out.",
    ),
    "not_enough_gpus": (
        "too few GPUs are free",
        "The whole gang starts together, and fewer GPUs are free than it needs.",
        "Wait, ask for fewer ranks, or set gang.min_ranks below ranks.",
    ),
    "not_enough_cpus": ("too few CPUs are free", "The gang needs more CPUs than are free.", "Ask for fewer by resources.cpus."),
    "not_enough_memory": ("too little memory is free", "The gang needs more memory than is free.", "Ask for less by resources.memory."),
    "maintenance": (
        "a maintenance is planned",
        "It would fit now, but the nodes with room are to be maintained, and it would not have ended by then.",
        "Give it a time_limit that ends before the time in the message, or wait; `gangline reservation list` shows what is planned.",
    ),
    "reserved_for": (
        "the room is kept for others",
        "It would fit now, but a gang before it, or a reservation, needs the room later, and it might not have ended by then.",
        "Give it a time_limit that ends before the time in the message, or wait; `gangline why` of the other job says what it waits for.",
    ),
    "ranks_may_run": (
        "its ranks may still run",
        "A node that ran it cannot be reached, and the job says on_disconnect: keep: a second copy must not run.",
        "Bring the node back, or say that it is dead: POST /v1/nodes/NODE:confirm_dead.",
    ),
    "reserved": (
        "has its place as soon as others have left it",
        "Ranks that are leaving still hold what this gang will get; nobody else is given it meanwhile.",
        "Wait. What leaves has the grace of its own job file.",
    ),
    "dependency": (
        "another job comes first",
        "The job depends on others that have not got as far as it asks. When they never can, it is cancelled.",
        "Wait; `gangline why` on the job that it waits for says more.",
    ),
    "held": (
        "somebody holds it",
        "The job, or the array that it belongs to, was submitted with `hold: true` or held by `gangline hold`.",
        "`gangline release JOB`.",
    ),
    "before_begin": (
        "its time has not come",
        "The job says `begin`, and is not placed before that.",
        "Wait, or submit it anew without `begin`.",
    ),
    "array_turn": (
        "its turn in the array has not come",
        "Elements of an array become jobs in order: as many as the array allows at once, and some that wait in the queue.",
        "Wait; `gangline show` on the array says how far it is.",
    ),
    "queue_held": (
        "the queue is on hold",
        "The queue, or one above it, takes jobs and starts none.",
        "`gangline queues` shows it; who declared the queues can open it.",
    ),
    "over_limit": (
        "over the limit of the queue",
        "With this gang, its queue or one above it would hold more than its limit.",
        "Wait until others of the queue have ended, or have the limit raised.",
    ),
    "over_quota": (
        "over the quota of the queue",
        "Work that cannot be preempted may only use quota, and what is left of it is too little.",
        "Submit it with preemptible: true, wait until others have ended, or have the quota raised.",
    ),
    "no_one_model": (
        "enough GPUs are free, but not of one model",
        "All ranks of a role are on GPUs of one model, since the slowest sets the pace of all, and no model has room for all of them.",
        "Wait, ask for fewer ranks, or allow several models by resources.gpu_model_mix: true.",
    ),
    "not_enough_mig": (
        "too little room for MIG instances",
        "The gang needs more instances of its MIG profile than idle GPUs, and the rest of GPUs that are partitioned already, have room for.",
        "Ask for fewer or smaller instances by resources.mig, or wait: GPUs that others have whole or share can be partitioned when they idle.",
    ),
    "no_domain_fits": (
        "no single domain of the topology has room",
        "All ranks must be in one domain of the level that the job requires, and none has room for all of them.",
        "Wait, ask for fewer ranks, or require a coarser level.",
    ),
    "outside_topology": (
        "no node is inside of the topology",
        "Only nodes count that carry all labels of the topology that the job asks for, also for a preference, and it can use none of them.",
        "Label the nodes (`gangline nodes -o wide` shows labels), or declare the topology with the labels that they have.",
    ),
    "skew_too_large": (
        "numbers in domains would differ by too much",
        "The job bounds by max_skew how far the numbers of its ranks in domains may differ, and what is free does not allow that.",
        "Wait, raise max_skew, or leave it out: then they are as equal as the room allows, and nothing waits for that.",
    ),
    "unknown_topology": (
        "no such topology or level",
        "The job asks to be placed by a topology, or a level of it, that the cluster does not have.",
        "Correct the job file, or declare the topology. Without a declaration only labels count that all nodes carry that are up.",
    ),
    "no_node_allowed": (
        "no node that it may use",
        "It may only run on certain nodes (by GPU model, or because others failed to prepare it lately), and none of them takes new ranks.",
        "`gangline nodes` shows them; nodes that failed to prepare it are tried again after a minute.",
    ),
    "no_such_device": (
        "no node gives such devices",
        "No node gives devices in the way in which they are asked for.",
        "`gangline nodes` shows what there is.",
    ),
    "gang_incomplete": (
        "too few of its ranks can still run",
        "So many of the gang's ranks are gone for good that its minimum cannot be reached.",
        "Stop the job and submit it again.",
    ),
    "no_victims": (
        "nothing may be evicted for it",
        "It does not fit, and no work that it may displace would make enough room.",
        "Wait, raise its priority within the queue, or ask for less.",
    ),
    "policy_error": (
        "the scheduler's rules failed on this job",
        "A fault in the scheduler met this job; others are not affected. The scheduler's own log has the details.",
        "Report it with the job file; a job of another shape may pass.",
    ),
    "fragmented": (
        "enough is free, but spread",
        "In all there is enough, but no set of nodes has room for whole ranks (or for ranks_per_node of them) as the free part is spread.",
        "Leave out or lower gang.ranks_per_node, or wait until a node becomes empty.",
    ),
}
