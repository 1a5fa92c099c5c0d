# ---- The first error of a start of the ranks, so that an error that comes again is not retried for ever. In
# sh and awk, without anything that Kubernetes expands, since all sites use it. Needs _run_dir and _attempt.
_alike='
  function loose(text) {  # without paths and numbers
    gsub(/\/[^ ,;"]+/, "/*", text); gsub(/[0-9]+/, "#", text)
    return text
  }
  function alike(before, now, in_a_row,   a, b) {  # lines of first_error
    split(before, a, "\t"); split(now, b, "\t")
    if (before == "" || a[1] != b[1] || a[1] == "unsure") return 0
    if (a[1] == "fault" && a[3] == b[3]) return 1  # at any step
    if (a[2] ~ /^[0-9]/ && a[2] == b[2]) return loose(a[3]) == loose(b[3])
    return in_a_row && before == now
  }'

first_error() {  # FOLDER all|last [MARK] <TORCHRUN'S_REPORTS: reads files below FOLDER that are newer than MARK;
  # all: each start of one torchrun; last: the last start of all nodes. Prints KIND<tab>STEP<tab>MESSAGE of the
  # last start, or of the second of two that are alike. KIND is `error` (a rank has raised it), `fault` (an
  # exception that mostly is the code's fault), `bare` (a signal, an exit status or a lost peer, at a known step)
  # or `unsure` (the step is not known).
  _outcome=$_run_dir/outcome.json
  [ -z "${3:-}" ] || find "$_outcome" -newer "$3" 2>/dev/null | grep -q . || _outcome=/dev/null
  {
    grep -E '^( +(time|host|exitcode) *:|Root Cause)' || true
    find "$1" -path '*/attempt_*' \( -name error.json -o -name stderr.log \) \
      ${3:+-newer "$3"} -exec ls -tr {} + 2>/dev/null || true
  } | _starts=$2 _all_ended=${_all_ended:-} _run_dir=$_run_dir _outcome=$_outcome _attempt=$_attempt _nodes=$1/nodes LC_ALL=C awk "$_alike"'
    function json(text, name) {  # the value of a name; of a text, its first line
      if (!match(text, "\"" name "\" *: *[\"0-9a-z]")) return ""
      text = substr(text, RSTART + RLENGTH - 1)
      if (text !~ /^"/) { sub(/[^0-9a-z].*/, "", text); return text }
      text = substr(text, 2, 1000)
      gsub(/\\\\/, "\001", text); gsub(/\\"/, "\002", text); sub(/(\\n|").*/, "", text)
      gsub(/\002/, "\"", text); gsub(/\001/, "\\", text)
      return text
    }
    function tail(path, bytes) {  # returns a command; a path may hold any character
      gsub(q, q "\\" q q, path)
      return "tail -c " bytes " " q path q " 2>/dev/null"
    }
    function printed(path,   line, text, open, more, ignored) {  # the last exception in the stderr of a rank without an error file
      while ((tail(path, 65536) | getline line) > 0) {
        sub(/^\[rank[0-9]+\]: ?/, "", line)
        if (line ~ /^Exception ignored/) ignored = 1  # by Python, mostly when it ends
        else if (line ~ /^Traceback \(most recent call last\):/) { open = !ignored; more = ignored = 0 }
        else if (line ~ /^ *what\(\): /) { text = line; sub(/^ *what\(\): */, "", text); open = more = 0 }
        else if (line ~ /^Fatal Python error: /) { if (!text || more > 2) text = line; open = more = 0 }
        else if (line == "" || line ~ /^[ \t]/) continue
        else if (open) { text = line; open = 0 }
        else more++
      }
      close(tail(path, 65536))
      return more > 50 ? "" : text  # with more lines after it, the rank went on
    }
    function masked(text, what, how,   word, out) {
      while (match(text, what)) {
        word = substr(text, RSTART, RLENGTH)
        out = out substr(text, 1, RSTART - 1); text = substr(text, RSTART + RLENGTH)
        if (how == "number") sub(/[0-9]+$/, "*", word)
        else if (how == "time") word = text ~ /^[A-Za-z0-9]/ ? word : "* s"
        else if (word ~ /[0-9]/ && word ~ /[a-f]/) word = "*"  # an id, hexadecimal
        out = out word
      }
      return out text
    }
    function plain(text,   host, at, word, out) {  # masks what differs from start to start
      gsub(/\t/, " ", text)
      for (host in hosts) {
        out = ""
        while (host != "" && (at = index(text, host))) {
          word = substr(text, at - 1, at > 1) substr(text, at + length(host), 1)
          out = out substr(text, 1, at - 1) (word ~ /[A-Za-z0-9_]/ ? host : "*")
          text = substr(text, at + length(host))
        }
        text = out text
      }
      gsub(/0x[0-9A-Fa-f]+/, "0x*", text)
      gsub(/attempt[-_][0-9]+\/[^ "]*/, "attempt-*", text)
      gsub(/\/tmp[A-Za-z0-9_]+/, "/tmp*", text)
      gsub(/[0-9]+-[0-9][0-9]-[0-9][0-9]/, "*", text)
      gsub(/[0-9]+:[0-9][0-9]:[0-9][0-9]([.,][0-9]+)?/, "*", text)
      gsub(/[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+/, "*", text)
      gsub(/:[0-9][0-9][0-9][0-9]+/, ":*", text)
      gsub(/[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]+(\.[0-9]+)?/, "*", text)
      text = masked(text, "[0-9.]*[0-9] ?(milliseconds|seconds|minutes|ms|us|s)", "time")
      text = masked(text, "([Pp][Ii][Dd]|[Pp]rocess|[Tt]hread|[Aa]ttempt|[Rr]estart|[Pp]ort|[Rr]ank|GPU|cuda)[ =:_-]*[0-9]+", "number")
      text = masked(text, "[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]+", "id")
      return substr(text, 1, 300)
    }
    function of_start(line, start,   its) {  # whether a record is of this attempt, and of this start
      its = json(line, "attempt")
      if (its != "" && its != ENVIRON["_attempt"]) return 0
      its = json(line, "restart")
      return its == "" || (start == "" ? its + 0 >= fewest : its == start)
    }
    function step(start,   dir, line, text, made) {  # N; `N+` for N or later; or the name of the newest checkpoint
      dir = ENVIRON["_run_dir"]
      while ((getline line < ENVIRON["_outcome"]) > 0) text = text " " line
      close(ENVIRON["_outcome"])
      if (json(text, "attempt") == ENVIRON["_attempt"]) made = json(text, "step")
      if (made != "" && of_start(text, start) && json(text, "status") ~ /retryable|fatal/) return made
      if (made != "") made = made "+"
      while ((tail(dir "/events.jsonl", 65536) | getline line) > 0)
        if (line ~ /"event": *"error"/ && start != "" && of_start(line, start)) text = "exact " json(line, "step")
      close(tail(dir "/events.jsonl", 65536))
      if (text ~ /^exact [0-9]/) return substr(text, 7)
      while ((tail(dir "/metrics.jsonl", 65536) | getline line) > 0)
        if (of_start(line, start) && json(line, "step") != "") made = json(line, "step") "+"
      close(tail(dir "/metrics.jsonl", 65536))
      line = dir "/checkpoints"; gsub(q, q "\\" q q, line); line = "ls -t " q line q " 2>/dev/null"
      if (made == "" && (line | getline text) > 0) made = "after " text
      close(line)
      return made == "" ? "-" : made
    }
    function look(start,   i, text, bare, at) {  # at a start; "" is the last one of each node
      bare = died
      for (i = 1; i <= files; i++) {
        if (start != "" ? number[i] != start : run[i] != newest[node[i]] || number[i] != most[run[i]]) continue
        if (file[i] ~ /error.json$/) { getline text < file[i]; text = json(text, "message") }
        else if ((rank[i], "error.json") in has || (!ENVIRON["_all_ended"] && number[i] == most[run[i]])) continue
        else text = printed(file[i])
        if (text == "" || text ~ /^stopped by /) continue
        if (tolower(text) !~ peer || tolower(text) ~ own) return (text ~ fault ? "fault" : "error") "\t" step(start) "\t" plain(text)
        if (bare !~ /^signal/) bare = "ranks have lost another one"
      }
      if (bare == "") return ""
      at = step(start)
      return (at ~ /^[0-9]+$/ ? "bare" : "unsure") "\t" at "\t" bare
    }
    BEGIN {
      q = "\047"
      peer = "connection (closed|reset) by peer|connection (refused|was closed)|broken pipe" \
        "|remote process exited|connectfullmesh failed|gloo/transport|(recv|send)(value|bytes) failed" \
        "|failed to (recv|send)|nccl error|nccl communicator was aborted" \
        "|dist(backend|network|store)error|watchdog caught collective|timed ?out|wait timeout" \
        "|ends because of others|another rank went away|^the same as (rank [0-9]+|another rank)"
      fault = "^(Assertion|Attribute|Import|Index|Key|ModuleNotFound|Name|NotImplemented|Recursion|Syntax|Type|UnboundLocal" \
        "|Value|ZeroDivision)Error(:|$)"
      own = "nccl(invalidusage|invalidargument|unhandledcudaerror)|enforce fail|collective mismatch"
      hosts[ENVIRON["HOSTNAME"]]
      while ((getline host < ENVIRON["_nodes"]) > 0) hosts[host]
    }
    /^Root Cause/ { root = 1 }
    /^ +time/ { when = $3 (root ? "" : "~"); root = 0 }  # in one second, the failure that torchrun observed first
    /^ +host/ { hosts[$3] }
    /^ +exitcode/ && $3 !~ /^-(1|2|3|10|15)$/ {  # not a signal with which torchrun ends ranks
      if (first == "" || when $3 < first) {
        first = when $3
        died = $3 < 0 ? "signal " (0 - $3) : "exit status " $3
      }
    }
    /^\// {
      file[++files] = $0
      text = $0; name = sub(/\/[^\/]*$/, "", text) ? substr($0, length(text) + 2) : ""
      rank[files] = text; has[text, name]
      sub(/\/[^\/]*$/, "", text); number[files] = substr(text, match(text, /[0-9]+$/))
      sub(/\/[^\/]*$/, "", text); run[files] = text
      if (!(text in most) || number[files] + 0 > most[text] + 0) most[text] = number[files]
      sub(/\/[^\/]*$/, "", text); node[files] = text
      newest[text] = run[files]
    }
    END {
      for (n in newest) if (fewest == "" || most[newest[n]] + 0 < fewest) fewest = most[newest[n]] + 0
      if (ENVIRON["_starts"] == "last") now = look("")
      else for (n = 0; n <= most[run[1]]; n++) {
        now = at_start[n] = look(n "")
        for (m = 0; m < n && again == ""; m++) if (alike(at_start[m], now, m == n - 1)) again = now
        if (again != "") break
      }
      if (ENVIRON["_starts"] == "all") now = again
      if (now != "") print now
    }'
}

same_failure() {  # BEFORE NOW, lines of first_error
  printf '%s\n' "$1" "$2" | LC_ALL=C awk "$_alike"'{ line[NR] = $0 } END { exit !alike(line[1], line[2], 1) }'
}

find_alike() {  # ERROR FILE...: sets _earlier to the first line that is the same failure, _twice_in to its folder
  _now=$1
  shift
  for _file in "$@"; do
    _twice_in=${_file%/*}
    # shellcheck disable=SC2006  # see above
    _earlier=`cat "$_file" 2>/dev/null` || true
    ! same_failure "$_earlier" "$_now" || return 0
  done
  _earlier='' _twice_in=''
}

repeated() {  # FOLDER... of torchruns: whether one has failed alike in two starts; sets _twice
  for _folder_of_one in "$@"; do
    [ -d "$_folder_of_one/attempt_1" ] || continue
    _state=$_folder_of_one
    for _seen in "$_folder_of_one"/attempt_* "$_folder_of_one"/attempt_*/*/error.json; do
      [ ! -e "$_seen" ] || _state=$_state:${_seen#"$_folder_of_one"}
    done
    case ${_looked_at:-} in *"<$_state>"*) [ -n "${_all_ended:-}" ] || continue ;; esac
    _looked_at="${_looked_at:-}<$_state>"  # the same files have the same errors
    # shellcheck disable=SC2006  # see above
    _twice=`first_error "$_folder_of_one" all </dev/null`
    case $_twice in
      '') ;;
      *"another one") _echo=$_twice _echo_at=${_echo_at:-`date +%s`} ;;  # another node, whose files may come late, has the cause
      *) return 0 ;;
    esac
  done
  _twice=${_echo:-}
  [ -n "$_twice" ] && { [ -n "${_all_ended:-}" ] || [ "`date +%s`" -ge "`expr "$_echo_at" + 60`" ]; }
}

in_words() {  # LINE of first_error: prints a sentence
  printf '%s\n' "$1" | awk -F '\t' '{
    at = $2 ~ /^[0-9]+$/ ? " at step " $2 : $2 ~ /^[0-9]+[+]$/ ? " at step " $2 + 0 " or later" : ""
    if ($2 ~ /^after /) at = " with no checkpoint " $2
    print "the same failure twice" at ": " $3
  }'
}
