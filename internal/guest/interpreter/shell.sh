# The shell kernel of an AgentRun sandbox: a loop that runs what it is sent, in
# this shell. Requests come on 3, a line each: a letter, then text for printf %b.
# Answers go to 4. Neither is open in what it runs.
_agentrun_reset=:
_agentrun_int='_agentrun_hit=1; return 130 2>/dev/null'
if [ -n "${BASH_VERSION:-}" ]; then
	# An interrupt returns from every function, and from the text.
	_agentrun_halt() { return 2; }
	_agentrun_int='_agentrun_hit=1; shopt -s extdebug; set -T; trap "((\${#BASH_SOURCE[@]} < 1)) || _agentrun_halt" DEBUG; return 130 2>/dev/null'
	# No function: the trap would return from it.
	_agentrun_reset='trap - DEBUG; set +T; shopt -u extdebug'
fi
printf 'ready %s\n' "${BASH_VERSION:-sh}" >&4
while IFS= read -r _agentrun_line <&3; do
	_agentrun_text=$(printf '%b.' "${_agentrun_line#?}")
	_agentrun_text=${_agentrun_text%.}
	case $_agentrun_line in
	r*)
		eval "$_agentrun_reset"
		_agentrun_hit=
		trap "$_agentrun_int" INT
		printf 'begin\n' >&4
		# Sourced: a function around it would make its declarations local.
		. /proc/self/fd/9 9<<_AGENTRUN_END_ 3<&- 4>&-
$_agentrun_text
_AGENTRUN_END_
		_agentrun_code=$?
		eval "$_agentrun_reset"
		printf 'done %s %s\n' "$_agentrun_code" "$_agentrun_hit" >&4
		;;
	e*) eval "$_agentrun_text" 3<&- 4>&- ;;
	esac
done
