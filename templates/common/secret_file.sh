secret_file() {  # NAME FILE; exports the value, so that no command line and no log contains it
  local -
  set +x
  [ -r "$2" ] || fail "secret $1: cannot read $2"
  case `stat -Lc %a "$2"` in *00) ;; *) fail "secret $1: others may read $2; chmod 600 it" ;; esac
  printf -v "$1" %s "`cat "$2"`"
  [ -n "${!1}" ] || fail "secret $1: $2 is empty"
  export "${1?}"
}
